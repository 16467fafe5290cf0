#pragma once

// How every operation runs on Thrust: one call of a function object for each index. The object is a struct of
// raw pointers and sizes with operator()(Index) const; it writes only what belongs to its index, so the order
// of the calls never shows in a result. Not installed.

#include <thrust/execution_policy.h>
#include <thrust/for_each.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/system/system_error.h>

#include <string>

#include "cuda/memory.hpp"
#include "cuda/runtime.hpp"
#include "sim/arithmetic.hpp"

namespace hae::device {

/// What of a flattened index belongs to its fastest axis; the rest is left in `index`.
HAE_HOST_DEVICE inline Index take_axis(Index& index, Index extent) {
  const Index along = index % extent;
  index /= extent;
  return along;
}

/// The error of a launch as ours; forgets it, so that it does not come back from a later call.
[[noreturn]] inline void throw_device_error(const char* operation, const char* reason) {
#ifdef HAE_ACCELERATOR
  static_cast<void>(HAE_GPU(GetLastError)());
#endif
  throw DeviceError(std::string(operation) + ": the device reports '" + reason + "'");
}

/// Throws when the last launch was refused.
inline void check_launch(const char* operation) {
#ifdef HAE_ACCELERATOR
  if (const auto status = HAE_GPU(PeekAtLastError)(); status != HAE_GPU(Success)) {
    throw_device_error(operation, HAE_GPU(GetErrorString)(status));
  }
#else
  static_cast<void>(operation);
#endif
}

/// Calls body(0) .. body(count - 1) in any order, after what the stream holds already. On an accelerator the
/// call returns before they are done. Counts may exceed 2^32: the grid is Thrust's, one-dimensional.
///
/// operation  begins the message of a DeviceError
template <typename Body>
void for_each_index(const char* operation, Stream stream, Index count, const Body& body) {
  if (count <= 0) {
    return;
  }
  const thrust::counting_iterator<Index> first(0);
  try {
#ifdef HAE_ACCELERATOR
    using Handle = HAE_GPU(Stream_t);
    thrust::for_each_n(HAE_GPU_SYSTEM::par_nosync.on(static_cast<Handle>(stream)), first, count, body);
#else
    static_cast<void>(stream);
    thrust::for_each_n(thrust::device, first, count, body);
#endif
  } catch (const thrust::system_error& error) {
    throw_device_error(operation, error.what());
  }
  check_launch(operation);
}

}  // namespace hae::device
