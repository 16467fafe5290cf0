#pragma once

#include <functional>

#include "sim/replay.hpp"

namespace hae::cli {

/// Threads of one command.
class Parallel {
 public:
  /// threads  0: one a core
  explicit Parallel(Index threads);

  /// For the engine: tasks of one call run beside each other and wait for no other work.
  [[nodiscard]] ForEach for_each() const;

  /// Calls work(0) .. work(count - 1) on several threads, at most as many ahead as there are threads, and
  /// done(i) in ascending order on one thread at a time. When work throws, done is called for what came
  /// before it, then the error of lowest index is thrown: what a caller sees does not depend on the number of
  /// threads.
  void in_order(Index count, const std::function<void(Index)>& work,
                const std::function<void(Index)>& done) const;

 private:
  int threads_;
};

}  // namespace hae::cli
