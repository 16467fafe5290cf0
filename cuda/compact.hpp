#pragma once

#include <cstdint>
#include <span>

#include "cuda/memory.hpp"

namespace hae::device {

/// One array of a cache whose rows move together with its tokens: keys, values, positions or scores.
struct CompactedRows {
  const void* from = nullptr;  ///< [lanes, slots] rows, device memory
  void* to = nullptr;          ///< the same, or other memory
  Index row_bytes = 0;         ///< of one token; a multiple of 2
};

/// Removes tokens from many lanes at once and closes the gaps: what is kept keeps its order.
struct Compaction {
  Index lanes = 0;
  Index slots = 0;                     ///< of a lane
  const std::uint8_t* keep = nullptr;  ///< [lanes, slots] 1 where the token stays
  const Index* lengths = nullptr;      ///< [lanes] tokens before
};

/// In place, or from one memory to another, for each array on its own; the two may not overlap otherwise.
///
/// Each thread moves one word of a lane's rows, slot after slot: neighbouring threads move neighbouring
/// words, and no word is overwritten before it was read.
///
/// kept  [lanes] tokens after; may be Compaction::lengths
void compact(const Compaction& compaction, std::span<const CompactedRows> arrays, Index* kept, Stream stream);

}  // namespace hae::device
