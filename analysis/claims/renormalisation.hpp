#pragma once

#include <span>

#include "analysis/claims/finding.hpp"

// Eviction acts on a row of attention through renormalisation alone. What that does, exactly: the identities
// behind missed mass, KL and output error (sim/metrics.hpp). Proofs: analysis/claims/renormalisation.md.
//
// Each finding sets the definition, formed in double from the row's weights, against the right-hand side with
// the missed mass m as the engine measures it, from canonical float32 sums. `rounding` is a computed bound on
// the error of both: rounding_of() the operations in double, canonical_rounding_of() each float32 sum.
//
// A row without mass, or without resident mass (m = 1), meets no identity's assumption.

namespace hae::analysis {

/// One row of one query head, over its full key set.
struct AttentionRow {
  std::span<const float> weights;  ///< [keys] w_j >= 0, finite, by position; 0 where the mask forbids
  std::span<const float> keep;     ///< [keys] 1 for a resident, 0 for an evicted token
  View<const float, 2> values;     ///< [at least keys, head_dim]; needed by the output's identities
};

/// ROW.variation: the total variation ½ Σ |a_j - a'_j| equals m.
Finding total_variation(const AttentionRow& row);

/// ROW.kl: KL(a'‖a) = Σ_S a'_j ln(a'_j / a_j), with 0 ln 0 = 0, equals -ln(1 - m).
Finding kl_divergence(const AttentionRow& row);

/// ROW.output: o - o' = m (v̄_E - v̄_S), with v̄ the means of V under a over the evicted and the residents;
/// here the lengths of both sides. Needs m > 0.
Finding output_identity(const AttentionRow& row);

/// ROW.diameter: ‖o - o'‖ <= m diam(V).
///
/// diameter  at least the largest distance between two values of the row's keys (diameter_bound)
Finding output_within_diameter(const AttentionRow& row, double diameter);

/// ROW.one-token: if one token with p = a_j < 1 is evicted, ‖o - o'‖ = p/(1-p) ‖o - v_j‖.
Finding output_without_one_token(const AttentionRow& row);

/// The largest distance ‖v_i - v_j‖₂ of two values, rounded up. O(keys² head_dim).
double diameter_bound(View<const float, 2> values);

}  // namespace hae::analysis
