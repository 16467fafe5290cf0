#pragma once

#include <functional>
#include <string>

#include "sim/view.hpp"

// Private to this folder: work that may crash, done first where a crash does no harm.

namespace hae::traces {

/// The most memory that a file's metadata may cost: names, attributes, indices and everything per token.
inline constexpr Index kMetadataBytes = Index{1} << 30;

/// Whether the limit holds. Not under the address sanitizer, whose shadow needs terabytes of addresses.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kMemoryIsBounded = false;
#elif defined(__has_feature)
inline constexpr bool kMemoryIsBounded = !__has_feature(address_sanitizer);
#else
inline constexpr bool kMemoryIsBounded = true;
#endif

/// Runs `work` in a child process and returns if it ends there, so that the caller can run it here: the child
/// is a copy of this process, and what did no harm to it does none here. What `work` changes in memory is
/// lost.
///
/// The child may take kMetadataBytes of memory on top of what this process has, and 2 s of processor time, 1
/// s more a MiB of `file_bytes`. It prints nothing and leaves no core file. It holds copies of all locks:
/// locks that `work` takes must be held by the caller or be used by no other thread.
///
/// throws TraceError  the one that `work` threw there, or `FILE: HDF5 crashes on its metadata ...` when the
///                    child died or met a limit
void rehearse(const std::string& file, Index file_bytes, const std::function<void()>& work);

}  // namespace hae::traces
