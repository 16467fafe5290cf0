#pragma once

#include <functional>
#include <mutex>

#include "sim/view.hpp"

namespace hae {

/// Tells how much of a sequence is read, row by row, from any threads.
class RowProgress {
 public:
  /// show  called with the share that is done, in [0, 1], by one thread at a time; may be empty
  /// all   rows of all layers; it lives as long as this
  RowProgress(const std::function<void(double)>& show, Index all) : show_(show), all_(all) {}

  void add(Index rows) {
    if (!show_) {
      return;
    }
    const std::scoped_lock lock(mutex_);
    done_ += rows;
    show_(static_cast<double>(done_) / static_cast<double>(all_));
  }

 private:
  const std::function<void(double)>& show_;
  Index all_;
  std::mutex mutex_;
  Index done_ = 0;
};

}  // namespace hae
