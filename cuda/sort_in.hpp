#pragma once

// Sorting, with the memory that Thrust needs for it taken from work space on an accelerator, so that nothing
// is allocated there in a step. Not installed.

#include <thrust/sort.h>

#include <cstddef>

#include "cuda/for_each_index.hpp"

namespace hae::device {

#ifdef HAE_ACCELERATOR

/// Hands out one piece of memory to a Thrust algorithm, which gives its parts back in reverse order.
class Arena {
 public:
  using value_type = char;

  Arena(void* memory, Index bytes) : next_(static_cast<char*>(memory)), end_(next_ + bytes) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  char* allocate(std::ptrdiff_t bytes) {
    HAE_EXPECTS(rounded(bytes) <= end_ - next_);
    return std::exchange(next_, next_ + rounded(bytes));
  }
  void deallocate(char* part, std::size_t /*bytes*/) { next_ = part; }

 private:
  static std::ptrdiff_t rounded(std::ptrdiff_t bytes) { return (bytes + 255) / 256 * 256; }

  char* next_;
  char* end_;
};

/// Bytes of work space that sort_in needs: a merge sort holds the items once more, and a few numbers for each
/// of its tiles.
template <typename Item>
Index sort_workspace_bytes(Index count) {
  return 2 * count * Index{sizeof(Item)} + (Index{1} << 20);
}

#else

/// The CPU systems take what they need from the heap, on each of their threads.
template <typename Item>
Index sort_workspace_bytes(Index /*count*/) {
  return 0;
}

#endif

/// Sorts items in place by an explicit order. Never by a default one: Thrust 3.0.1 sorts signed 32-bit
/// integers by their unsigned bits on its CPU systems (tests/device/select_lowest_test.cpp).
///
/// workspace  sort_workspace_bytes<Item>(count)
template <typename Item, typename Before>
void sort_in(void* workspace, Item* items, Index count, const Before& before, Stream stream) {
  try {
#ifdef HAE_ACCELERATOR
    Arena arena(workspace, sort_workspace_bytes<Item>(count));
    const auto queue = static_cast<HAE_GPU(Stream_t)>(stream);
    thrust::sort(HAE_GPU_SYSTEM::par_nosync(arena).on(queue), items, items + count, before);
#else
    static_cast<void>(workspace);
    static_cast<void>(stream);
    thrust::sort(thrust::device, items, items + count, before);
#endif
  } catch (const thrust::system_error& error) {
    throw_device_error("sorting", error.what());
  }
  check_launch("sorting");
}

}  // namespace hae::device
