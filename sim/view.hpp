#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "sim/errors.hpp"

namespace hae {

/// Every size, position and offset is signed and 64 bits wide: n * n passes 2^31 at n = 46,341.
using Index = std::int64_t;

/// An index as the standard library's containers take it.
inline std::size_t at(Index i) {
  return static_cast<std::size_t>(i);
}

/// Holds the product of any two Index values exactly.
__extension__ typedef __int128 WideIndex;

/// A non-owning, contiguous, row-major array: a strict subset of `std::mdspan` (absent from g++ 12).
template <typename T, std::size_t Rank>
class View {
 public:
  View() = default;

  View(T* data, std::array<Index, Rank> extents) : data_(data), extents_(extents) {
    for (const Index extent : extents_) {
      HAE_EXPECTS(extent >= 0);
    }
  }

  /// A view of mutable elements is also a view of constant ones.
  operator View<const T, Rank>() const requires(!std::is_const_v<T>) { return {data_, extents_}; }

  [[nodiscard]] Index extent(std::size_t axis) const { return extents_[axis]; }
  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] bool empty() const { return size() == 0; }

  [[nodiscard]] Index size() const {
    Index count = 1;
    for (const Index extent : extents_) {
      count *= extent;
    }
    return count;
  }

  /// The slab at `index` of the first axis: a view of one rank less, or an element of a vector.
  [[nodiscard]] decltype(auto) operator[](Index index) const {
    if constexpr (Rank == 1) {
      return static_cast<T&>(data_[index]);
    } else {
      std::array<Index, Rank - 1> rest{};
      Index stride = 1;
      for (std::size_t axis = 1; axis < Rank; ++axis) {
        rest[axis - 1] = extents_[axis];
        stride *= extents_[axis];
      }
      return View<T, Rank - 1>{data_ + index * stride, rest};
    }
  }

  /// A vector as a standard span.
  [[nodiscard]] std::span<T> span() const requires(Rank == 1) {
    return {data_, static_cast<std::size_t>(extents_[0])};
  }

 private:
  T* data_ = nullptr;
  std::array<Index, Rank> extents_{};
};

}  // namespace hae
