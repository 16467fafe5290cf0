#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "sim/cache.hpp"
#include "sim/view.hpp"

// How arrays cross between numpy and the engine.

namespace hae::python {

namespace nb = nanobind;

/// float32 [heads, rows, columns] in C order, in this process's memory. The Python side makes others so, by a
/// copy.
using FloatArray = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

/// A numpy array; of const numbers it is read-only.
template <typename Number>
using NumpyArray = nb::ndarray<nb::numpy, Number>;

inline View<const float, 3> view(const FloatArray& array) {
  const auto extent = [&](std::size_t axis) { return static_cast<Index>(array.shape(axis)); };
  return {array.data(), {extent(0), extent(1), extent(2)}};
}

/// A numpy array of memory that `owner` keeps alive.
template <typename Number>
NumpyArray<Number> array_of(Number* data, std::initializer_list<std::size_t> shape, nb::handle owner) {
  return {data, shape.size(), shape.begin(), owner};
}

/// What keeps `value` alive for numpy.
template <typename Value>
nb::capsule owner_of(Value value) {
  auto owned = std::make_unique<Value>(std::move(value));
  nb::capsule owner(owned.get(), [](void* p) noexcept { delete static_cast<Value*>(p); });
  static_cast<void>(owned.release());
  return owner;
}

/// A numpy array that owns these numbers.
template <typename Number>
NumpyArray<Number> array_of(std::vector<Number> numbers, std::initializer_list<std::size_t> shape) {
  Number* data = numbers.data();  // moving the vector leaves them where they are
  return array_of(data, shape, owner_of(std::move(numbers)));
}

template <typename Number>
NumpyArray<Number> array_of(std::vector<Number> numbers) {
  const std::size_t size = numbers.size();
  return array_of(std::move(numbers), {size});
}

/// Positions that a lane holds, pending ones too, ascending.
inline NumpyArray<Index> residents_of(const LayerCache& cache, Index lane) {
  std::vector<Index> positions;
  for (Index token = 0; token < cache.joined(); ++token) {
    if (cache.is_resident(lane, token)) {
      positions.push_back(token);
    }
  }
  return array_of(std::move(positions));
}

}  // namespace hae::python
