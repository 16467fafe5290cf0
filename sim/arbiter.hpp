#pragma once

#include <map>
#include <utility>

#include "sim/active_run.hpp"

namespace hae {

/// When a policy decides in the prefill.
enum class Moment { prune, fit, balance };

/// Checks what a policy proposes and applies it to cache and log. Every refusal is a ContractViolation that
/// names policy, step, layer, lane and token: a policy that breaks the contract is a bug, not a result.
class Arbiter {
 public:
  /// ledger  where evictions and warnings are written
  Arbiter(ActiveRun& run, Ledger& ledger) : run_(run), info_(run.info), ledger_(ledger) {}

  /// Applies a prefill decision taken at `layer`, the last one whose prefill has begun.
  void prefill(const Decision& decision, Moment moment, Index layer);

  /// Applies the evictions of `layer` that waited for the end of its prefill.
  void deferred(Index layer);

  /// Applies one decode step's decision of one layer.
  void decode(const Decision& decision, Index step, Index layer);

  /// Checks that no lane holds more than the policy promised.
  void check_capacity(Index step, Index layer) const;

 private:
  [[nodiscard]] bool is_resident(Index lane, Index layer, Index token) const;
  void note(const Decision& decision);
  void expect(bool holds, Index step, const Evict& evict, const char* complaint) const;
  void check_lane(Index step, const Evict& evict) const;
  void check_sinks(Index step, const Evict& evict, Index lane) const;
  void check_recent(Index step, const Evict& evict, Index lane);
  void mark(const Mark& mark, Index step, Index layer);
  void apply(Index step, const Evict& evict, bool spares_recent);
  void apply_to_lane(Index step, const Evict& evict, Index lane, bool spares_recent);
  void remove_within(const Evict& evict);
  void note_merges(const Decision& decision, Index layer);
  void check_merge(const Evict& evict, Index layer) const;

  ActiveRun& run_;
  const SequenceInfo& info_;
  Ledger& ledger_;

  /// First protected position by (layer, lane), as it was before the first eviction of the decision.
  std::map<std::pair<Index, Index>, Index> recent_begin_;
};

}  // namespace hae
