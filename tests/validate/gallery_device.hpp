#pragma once

#include <string>

#include "validate/kernels.h"

namespace hae::gallery {

/// The right kernels on a device of the worst kind that keeps its promises: work waits in its stream until
/// somebody synchronizes, then the streams take turns, a task each; the default stream is never synchronized.
/// Arrays beyond 2^30 bytes do not fit.
///
/// fault  "": none; "default-stream": work is put there; "one-scratch": arguments of all calls pass through
///        one buffer; offered: prune alone
const hae_kernels* device_table_with(const std::string& fault);

/// Allocations that were not released.
int device_allocations();

}  // namespace hae::gallery
