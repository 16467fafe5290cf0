#pragma once

#include <span>
#include <string>
#include <vector>

#include "analysis/claims/finding.hpp"
#include "sim/replay.hpp"

// What pruning visual tokens by DAP loses in the layer that decides: the bounds that follow from its two
// thresholds (HAE Eq. (1)-(3), arXiv 2602.02197), and what `dap=mass` guarantees instead. Proofs:
// analysis/claims/pruning_loss.md.

namespace hae::analysis {

/// What a deciding layer showed to DAP, and whom DAP evicted. With a_ij the attention of text row i to token
/// j, reduced over query heads as the policy does (mean, or max):
///
///   A_j = Σ_i a_ij    A_V = Σ_{j in V} A_j    V: visual prompt tokens that a text row can see
///
/// order  rows ascending, then tokens ascending, in double, as the policy's
struct DecidingLayer {
  Index text_rows = 0;
  std::vector<Index> candidates;  ///< V, ascending
  std::vector<double> sums;       ///< [V] A_j
  std::vector<bool> evicted;      ///< [V] whether j is in C
  double largest_row_mass = 0;    ///< max over text rows of Σ_{j in C} a_ij

  [[nodiscard]] double total() const;         ///< A_V
  [[nodiscard]] double evicted_sum() const;   ///< Σ_C A_j
  [[nodiscard]] Index evicted_count() const;  ///< |C|
};

/// A deciding layer from its attention.
///
/// attention   [text rows, prompt] a_ij, zero where the mask forbids
/// candidates  V, ascending
/// evicted     C, ascending, in V
DecidingLayer deciding_layer(View<const double, 2> attention, std::span<const Index> candidates,
                             std::span<const Index> evicted);

/// Which layers of a sequence to look at, and how.
struct PruningView {
  HeadReduction heads = HeadReduction::mean;
  bool every_layer = false;  ///< broadcast=none; else layer 0 alone decides
};

/// The deciding layers of a sequence, read once more. No payload is kept: O(P) numbers a layer.
///
/// pruning  of a run that only prunes (`hae:...,ddes=none`), so that its log is C: what leaves in step 0
/// returns  [1], or [layers] with every_layer
/// throws   as replay()
std::vector<DecidingLayer> deciding_layers(Sequence& sequence, const EvictionLog& pruning,
                                           const PruningView& view, const ReplayOptions& options,
                                           const std::string& where);

/// DAP's thresholds: j leaves iff A_j < r A_V and max_i a_ij < α.
struct PruningThresholds {
  double r = 0;
  double alpha = 0;
};

/// DAP.columns: Σ_C A_j < |C| min(r A_V, α rows), strictly, if C is not empty and there is a text row. Both
/// sides are formed in double; `rounding` covers the sums and the products.
///
/// returns  cases: |C|
Finding pruned_columns(const DecidingLayer& layer, const PruningThresholds& thresholds);

/// DAP.rows: the evicted tokens have less than |C| α of the head-reduced attention of any text row of the
/// deciding layer.
///
/// returns  cases: text rows
Finding pruned_rows(const DecidingLayer& layer, const PruningThresholds& thresholds);

/// DAP.share: if r <= ε/c and |C| <= c, the lost share Σ_C A_j / A_V is below ε.
///
/// most  c >= 1, the most tokens that may go
Finding pruned_share(const DecidingLayer& layer, const PruningThresholds& thresholds, double epsilon,
                     Index most);

/// DAP.share read for r: the largest double r with r c <= ε, so that pruning with it loses less than epsilon
/// of A_V if at most c tokens go.
double largest_r(double epsilon, Index most);

/// MASS.guarantee: `dap=mass` loses at most the share it was given, Σ_C A_j <= eps A_V. Needs A_V > 0.
///
/// returns  measured and bound as shares of A_V
Finding mass_guarantee(const DecidingLayer& layer, double eps);

/// MASS.optimal: no set of candidates that spares the same sinks and loses at most the share eps has more
/// tokens than C. Needs scope=sequence, no alpha, no max_evicted.
///
/// sinks    positions 0 .. sinks - 1 are spared
/// returns  measured: the most tokens of any such set, counting those that are too close to call;
///          bound: |C|; rounding: how many were too close to call
Finding mass_optimal(const DecidingLayer& layer, double eps, Index sinks);

}  // namespace hae::analysis
