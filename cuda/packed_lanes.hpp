#pragma once

#include "cuda/lane_cache.hpp"

namespace hae::device {

/// Lanes whose tokens lie one beside the other, oldest first, as in a cache that is compacted: `cache` is
/// then indexed by slot.
struct PackedLanes {
  LaneCache cache;
  Index* lengths = nullptr;    ///< [lanes] tokens held
  Index* newest = nullptr;     ///< [lanes] slot of the newest
  Index* positions = nullptr;  ///< [lanes, slots] where a token stood; ascending
};

/// A token of this position joins every lane, behind the others.
void append(const PackedLanes& lanes, Index position, Stream stream);

/// After a compaction: lanes hold `kept` tokens, and none is pending.
void close_gaps(const PackedLanes& lanes, const Index* kept, Stream stream);

}  // namespace hae::device
