#pragma once

#include <cstddef>

#include "sim/view.hpp"

namespace hae::device {

/// Divides one piece of memory into arrays. Without memory it only counts, so that the same lines say how
/// much an operation needs and where its arrays are.
class Parts {
 public:
  explicit Parts(void* memory = nullptr) : begin_(static_cast<char*>(memory)) {}

  template <typename T>
  T* take(Index count) {
    T* part = begin_ == nullptr ? nullptr : reinterpret_cast<T*>(begin_ + taken_);
    constexpr Index kAlignment = 256;
    taken_ += (count * Index{sizeof(T)} + kAlignment - 1) / kAlignment * kAlignment;
    return part;
  }

  [[nodiscard]] Index bytes() const { return taken_; }

 private:
  char* begin_;
  Index taken_ = 0;
};

}  // namespace hae::device
