#include "sim/cli/parallel.hpp"

#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/parallel_pipeline.h>
#include <tbb/task_arena.h>

#include <atomic>
#include <exception>
#include <mutex>

namespace hae::cli {
namespace {

/// What the task of lowest index threw. Tasks after one that threw are not run.
class FirstError {
 public:
  explicit FirstError(Index tasks) : index_(tasks) {}

  /// Whether a task up to `index` has thrown.
  [[nodiscard]] bool precedes(Index index) const { return index_ <= index; }

  void guard(Index index, const std::function<void(Index)>& task) {
    if (precedes(index)) {
      return;
    }
    try {
      task(index);
    } catch (...) {
      const std::scoped_lock lock(mutex_);
      if (index < index_) {
        index_ = index;
        error_ = std::current_exception();
      }
    }
  }

  void rethrow() const {
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

 private:
  std::mutex mutex_;
  std::atomic<Index> index_;
  std::exception_ptr error_;
};

}  // namespace

Parallel::Parallel(Index threads)
    : threads_(threads > 0 ? static_cast<int>(threads) : tbb::info::default_concurrency()) {}

ForEach Parallel::for_each() const {
  if (threads_ == 1) {
    return {};
  }
  return [](Index count, const std::function<void(Index)>& task) {
    FirstError error(count);
    // Isolated: a thread that waits for its layers must not begin another sequence meanwhile.
    tbb::this_task_arena::isolate(
        [&] { tbb::parallel_for(Index{0}, count, [&](Index i) { error.guard(i, task); }); });
    error.rethrow();
  };
}

void Parallel::in_order(Index count, const std::function<void(Index)>& work,
                        const std::function<void(Index)>& done) const {
  FirstError error(count);
  Index next = 0;
  const auto source = [&](tbb::flow_control& control) {
    if (next == count || error.precedes(next)) {
      control.stop();
      return Index{0};
    }
    return next++;
  };
  const auto worker = [&](Index i) {
    error.guard(i, work);
    return i;
  };
  const auto sink = [&](Index i) { error.guard(i, done); };
  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism,
                                  static_cast<std::size_t>(threads_));
  tbb::task_arena arena(threads_);
  arena.execute([&] {
    tbb::parallel_pipeline(static_cast<std::size_t>(threads_),
                           tbb::make_filter<void, Index>(tbb::filter_mode::serial_in_order, source) &
                               tbb::make_filter<Index, Index>(tbb::filter_mode::parallel, worker) &
                               tbb::make_filter<Index, void>(tbb::filter_mode::serial_in_order, sink));
  });
  error.rethrow();
}

}  // namespace hae::cli
