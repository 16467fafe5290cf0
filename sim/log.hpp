#pragma once

#include <optional>
#include <string>
#include <vector>

#include "sim/view.hpp"

namespace hae {

/// The lane of a log entry when the layer itself is the lane.
inline constexpr Index kLayerLane = -1;

/// Where the key and value of an evicted token went: into those of a token that stays. With E all the tokens
/// that are merged into it, its key k and value v become
///
///   k = kept_weight · k_into + Σ_E weight_e · k_e,  v likewise
///
/// in double, E ascending by position, rounded once to float32. Its weight in a row is then size times the
/// exponential of its logit: ln size is added to the logit.
struct Merge {
  Index into = 0;
  double kept_weight = 0.5;  ///< the same for all of E
  double weight = 0.5;
  double size = 1.0;  ///< the same for all of E

  bool operator==(const Merge&) const = default;
};

/// One eviction.
struct LogEntry {
  Index step = 0;  ///< 0 = prefill
  Index layer = 0;
  Index lane = kLayerLane;
  Index token = 0;
  bool within = false;                 ///< left before the layer's prefill: it gave no row and no key there
  std::optional<double> score;         ///< at the moment of eviction; none where a policy has none
  std::optional<Index> pending_since;  ///< step of marking; none if it never was marked
  std::optional<Merge> merge;          ///< none: its key and value are gone

  bool operator==(const LogEntry&) const = default;
};

/// A token that was marked and still resident at the end.
struct PendingEntry {
  Index layer = 0;
  Index lane = kLayerLane;
  Index token = 0;
  Index since = 0;

  bool operator==(const PendingEntry&) const = default;
};

/// The only output of a run: every metric follows from (trace, log).
struct EvictionLog {
  std::vector<LogEntry> entries;      ///< sorted by (step, layer, lane, token)
  std::vector<PendingEntry> pending;  ///< sorted by (layer, lane, token)

  bool operator==(const EvictionLog&) const = default;
};

/// The log as JSON lines, one an eviction, numbers as the shortest text that reads back equal:
///   {"step":1,"layer":0,"lane":-1,"token":7,"within":false,"score":0.25,"pending_since":1,"into":null}
/// An entry that was merged ends in "into":9,"weights":[0.5,0.5],"size":1}: the kept and its own weight.
/// With a sequence index, "sequence":i comes first.
std::string to_json_lines(const EvictionLog& log, std::optional<Index> sequence = std::nullopt);

}  // namespace hae
