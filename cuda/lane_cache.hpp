#pragma once

#include <cstdint>

#include "cuda/memory.hpp"

namespace hae::device {

/// Which tokens many lanes hold, indexed by position, as a replay needs it: nothing is packed, and what left
/// is remembered, so that the eviction log can be read from these arrays at the end. All device memory.
struct LaneCache {
  Index lanes = 0;
  Index stride = 0;                  ///< positions of a lane's row
  std::uint8_t* resident = nullptr;  ///< [lanes, stride]
  Index* pending_since = nullptr;    ///< [lanes, stride] step of marking, -1 if never marked
  Index* evicted_in = nullptr;       ///< [lanes, stride] step of eviction, -1 if it never left
  double* evicted_score = nullptr;   ///< [lanes, stride] its score at that moment
};

/// Every lane holds the tokens that `resident` says; nothing was marked or evicted.
void begin_lanes(const LaneCache& cache, Stream stream);

/// tokens  [lanes] the position that joins each lane, -1 for none
void join(const LaneCache& cache, const Index* tokens, Stream stream);

/// What protects the tokens of a lane from eviction by score.
struct Protection {
  const Index* sinks = nullptr;   ///< [lanes] positions 0 .. sinks - 1
  const Index* recent = nullptr;  ///< [lanes] how many of the newest residents, pending ones counted
  const Index* newest = nullptr;  ///< [lanes] the position that joined last; -1: nothing is eligible
};

/// Residents that a score may evict: not a sink, not recent, not pending.
///
/// recent_begin  [lanes] work space
/// eligible      [lanes, stride]
void find_eligible(const LaneCache& cache, const Protection& protection, Index* recent_begin,
                   std::uint8_t* eligible, Stream stream);

/// Tokens that a selection chose, [lanes, most], -1 for none.
struct Chosen {
  const Index* tokens = nullptr;
  Index most = 0;
};

/// They leave in `step`; scores [lanes, stride], or null where a policy has none.
void evict(const LaneCache& cache, const Chosen& chosen, const double* scores, Index step, Stream stream);

/// They are gone without a trace: evictions that were decided elsewhere.
void remove(const LaneCache& cache, const Chosen& chosen, Stream stream);

/// They enter the recycle bin in `step`.
void mark(const LaneCache& cache, const Chosen& chosen, Index step, Stream stream);

/// Everything in the bin of a lane leaves in `step`, where is_full says so.
///
/// is_full  [lanes]
void empty_bins(const LaneCache& cache, const std::uint8_t* is_full, const double* scores, Index step,
                Stream stream);

}  // namespace hae::device
