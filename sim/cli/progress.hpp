#pragma once

#include <chrono>
#include <string>

namespace hae::cli {

/// A progress bar on stderr: only on a terminal, and only for work that takes longer than a second.
class Progress {
 public:
  /// total  units of work
  Progress(std::string label, double total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Work that is done, in [0, total].
  void show(double done);

 private:
  std::string label_;
  double total_;
  bool terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point last_;
};

}  // namespace hae::cli
