#pragma once

#include <memory>
#include <vector>

#include "sim/metrics.hpp"
#include "sim/policy.hpp"

namespace hae {

/// Which figure of the first run a budget is to match.
enum class MatchTarget { mean, peak };

/// The budget in 1 .. T whose attention-time tokens come nearest to the first run's, compared exactly as
/// integer totals; the lower one on a tie.
///
/// after_prune  [layers] residents of a lane when the pruning of the candidate's prefill is over
/// returns      the candidate with that budget
/// throws       ConfigError when no budget is possible, or when there is no decode step to compare
std::shared_ptr<const Policy> match_budget(const SequenceInfo& info, const RunResult& first,
                                           const std::shared_ptr<const Policy>& candidate,
                                           const std::vector<Index>& after_prune, MatchTarget target);

/// Residents of a lane of each layer when the pruning of its prefill is over, from the log of a run that
/// evicts nothing else in step 0. [layers]
std::vector<Index> residents_after_prune(const SequenceInfo& info, const RunResult& run);

}  // namespace hae
