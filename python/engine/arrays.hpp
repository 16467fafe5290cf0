#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <utility>
#include <vector>

#include "sim/view.hpp"

// How arrays cross between numpy and the engine.

namespace hae::python {

namespace nb = nanobind;

/// float32 [heads, rows, columns] in C order, in this process's memory. The Python side makes others so, by a
/// copy.
using FloatArray = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

inline View<const float, 3> view(const FloatArray& array) {
  const auto extent = [&](std::size_t axis) { return static_cast<Index>(array.shape(axis)); };
  return {array.data(), {extent(0), extent(1), extent(2)}};
}

/// A numpy array of memory that `owner` keeps alive.
template <typename Value>
nb::object array_of(Value* data, std::initializer_list<std::size_t> shape, nb::handle owner) {
  return nb::cast(nb::ndarray<nb::numpy, Value>(data, shape.size(), shape.begin(), owner));
}

/// A numpy array that owns these numbers.
template <typename Value>
nb::object array_of(std::vector<Value> values, std::initializer_list<std::size_t> shape) {
  auto owned = std::make_unique<std::vector<Value>>(std::move(values));
  Value* data = owned->data();
  nb::capsule owner(owned.release(), [](void* p) noexcept { delete static_cast<std::vector<Value>*>(p); });
  return array_of(data, shape, owner);
}

template <typename Value>
nb::object array_of(std::vector<Value> values) {
  const std::size_t size = values.size();
  return array_of(std::move(values), {size});
}

}  // namespace hae::python
