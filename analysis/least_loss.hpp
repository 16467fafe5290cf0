#pragma once

#include <span>
#include <vector>

#include "sim/view.hpp"

namespace hae::analysis {

/// One eviction of a lane: the token leaves after the attention of `step`, or in the prefill if that is 0.
struct TimedEviction {
  Index token = 0;
  Index step = 0;

  bool operator==(const TimedEviction&) const = default;
};

/// The evictions of one lane that lose the least attention, given how many tokens are resident at each step.
///
///   minimise  Σ over evictions (j, s)  Σ_{s < t <= steps} mass[t - 1, j]
///
/// Token P + s - 1 joins at step s and no token returns. So P + 1 - residents[0] tokens of the prompt leave
/// in the prefill (s = 0), and residents[s - 1] + 1 - residents[s] of the tokens that have joined leave after
/// step s; a token may go in the step it came. Nothing leaves after the last step. This is a transportation
/// problem between tokens and steps, solved exactly on costs that are rounded to a unit u: its loss exceeds
/// the least one by at most u for each eviction, and what double loses in the inner sum.
///
/// mass       [steps, P + steps]  attention that decode step row + 1 pays each token, summed over the lane's
///            query heads; finite, not negative; not read where the token has not joined yet
/// prompt     P >= 1
/// residents  [steps >= 1]  tokens at the attention of each step, its own included; at least 1, the first at
///            most P + 1 and each at most one more than the one before
/// returns    ascending by (step, token); of several evictions with the least loss always the same
/// order      the inner sum goes from the last step backwards, in double
/// unit       u = 2^-40, or the finest power of two with
///            (steps with evictions + 1) · (largest inner sum) < 2^60 u, which the solver's int64 sums need
/// memory     8 bytes for each step with evictions and token that has joined, and about 100 for each of the
///            possible evictions the solver looks at: a few dozen for each that is due (analysis/README.md)
/// throws     ContractViolation if an argument is not as said
std::vector<TimedEviction> least_loss_evictions(View<const double, 2> mass, Index prompt,
                                                std::span<const Index> residents);

}  // namespace hae::analysis
