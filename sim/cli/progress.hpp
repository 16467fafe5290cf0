#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <string>

namespace hae::cli {

/// A progress bar on stderr: only on a terminal, and only for work that takes longer than a second.
class Progress {
 public:
  /// total  units of work
  Progress(std::string label, double total);
  ~Progress() { wipe(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Work that is done, in [0, total].
  void show(double done);

  /// Takes the bar off the terminal, before anything else is printed there.
  void wipe();

 private:
  std::string label_;
  double total_;
  bool terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point last_;
};

/// Adds up what tasks that run beside each other have done.
class ProgressSum {
 public:
  /// show  is told the sum over tasks of the share that is done; it may throw to stop them
  explicit ProgressSum(std::function<void(double)> show) : show_(std::move(show)) {}

  /// For one task, which tells the share of it that is done, in [0, 1]. A reading begun again shows no
  /// progress of its own.
  std::function<void(double)> task();

 private:
  std::function<void(double)> show_;
  std::mutex mutex_;
  double done_ = 0.0;
};

}  // namespace hae::cli
