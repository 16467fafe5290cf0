#include "sim/cli/parallel.hpp"

#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/parallel_pipeline.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

namespace hae::cli {

Parallel::Parallel(Index threads)
    : threads_(threads > 0 ? static_cast<int>(threads) : tbb::info::default_concurrency()) {}

ForEach Parallel::for_each() const {
  if (threads_ == 1) {
    return {};
  }
  return [](Index count, const std::function<void(Index)>& task) {
    std::vector<std::exception_ptr> thrown(static_cast<std::size_t>(count));
    // Isolated: a thread that waits for its layers must not begin another sequence meanwhile.
    tbb::this_task_arena::isolate([&] {
      tbb::parallel_for(Index{0}, count, [&](Index i) {
        try {
          task(i);
        } catch (...) {
          thrown[static_cast<std::size_t>(i)] = std::current_exception();
        }
      });
    });
    const auto first = std::ranges::find_if(thrown, [](const auto& error) { return error != nullptr; });
    if (first != thrown.end()) {
      std::rethrow_exception(*first);
    }
  };
}

void Parallel::in_order(Index count, const std::function<void(Index)>& work,
                        const std::function<void(Index)>& done) const {
  using Done = std::pair<Index, std::exception_ptr>;
  Index next = 0;
  const auto source = [&](tbb::flow_control& control) {
    if (next == count) {
      control.stop();
      return Index{0};
    }
    return next++;
  };
  const auto worker = [&](Index i) -> Done {
    try {
      work(i);
      return {i, nullptr};
    } catch (...) {
      return {i, std::current_exception()};
    }
  };
  const auto sink = [&](const Done& result) {
    if (result.second) {
      std::rethrow_exception(result.second);
    }
    done(result.first);
  };
  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism,
                                  static_cast<std::size_t>(threads_));
  tbb::task_arena arena(threads_);
  arena.execute([&] {
    tbb::parallel_pipeline(static_cast<std::size_t>(threads_),
                           tbb::make_filter<void, Index>(tbb::filter_mode::serial_in_order, source) &
                               tbb::make_filter<Index, Done>(tbb::filter_mode::parallel, worker) &
                               tbb::make_filter<Done, void>(tbb::filter_mode::serial_in_order, sink));
  });
}

}  // namespace hae::cli
