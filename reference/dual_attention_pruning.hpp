#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "reference/selection.hpp"
#include "sim/policy.hpp"

namespace hae::reference {

/// Options of DAP (hae policies hae).
struct PruningOptions {
  enum class Rule { threshold, mass } rule = Rule::threshold;
  double r = 0;  ///< threshold: share of A_V below which a token is globally unimportant
  std::optional<double>
      alpha;       ///< largest single-row attention of a token that may go; always set with threshold
  double eps = 0;  ///< mass: share of A_V that may be lost
  HeadReduction heads = HeadReduction::mean;
  enum class Scope { sequence, image } scope = Scope::sequence;
  std::optional<Index> max_evicted;
  enum class Broadcast { all, none } broadcast = Broadcast::all;
  Effect effect = Effect::within;
};

/// What there is to tell of one pruning decision.
struct PruningCounts {
  Index text_rows = 0;
  Index candidates = 0;
  Index evicted = 0;
  double mass = 0;  ///< that text pays to the candidates
};

/// Reasons why nothing was pruned, and counts of what was left out.
std::vector<std::string> pruning_warnings(const SequenceInfo& info, Index layer, const PruningCounts& counts);

/// Dual-Attention Pruning in the prefill, HAE Eq. (1)-(3), arXiv 2602.02197.
///
/// Over prompt text rows i and the candidates V, visual prompt tokens that at least one of those rows can
/// see:
///
///   a_ij = mean over query heads of the layer      A_j = Σ_i a_ij      A_V = Σ_{j in V} A_j
///   evict j  iff  A_j < r A_V  and  max_i a_ij < alpha                 (both strict)
///
/// The choice is broadcast to all layers and lanes. State of one layer's rows; order: heads ascending, then
/// rows ascending, then tokens ascending, in double.
class DualAttentionPruning {
 public:
  /// sinks: positions that count in V and A_V but are never evicted.
  DualAttentionPruning(const SequenceInfo& info, const PruningOptions& options, Index sinks);

  /// Whether this layer decides: layer 0, or every layer without broadcast.
  [[nodiscard]] static bool decides(const PruningOptions& options, Index layer) {
    return layer == 0 || options.broadcast == PruningOptions::Broadcast::none;
  }

  /// Adds the text rows of a block.
  void observe(const Rows& rows);

  /// The evictions and what there is to say about them.
  [[nodiscard]] Decision decide(Index layer) const;

 private:
  [[nodiscard]] std::vector<Index> candidates() const;
  [[nodiscard]] std::vector<Scored> choose(const std::vector<Index>& candidates) const;
  [[nodiscard]] std::vector<Scored> below_thresholds(const std::vector<Index>& candidates) const;
  [[nodiscard]] std::vector<Scored> within_mass(const std::vector<Index>& candidates) const;
  [[nodiscard]] std::map<Index, std::vector<Index>> scopes(const std::vector<Index>& candidates) const;
  [[nodiscard]] double mass(const std::vector<Index>& tokens) const;
  [[nodiscard]] bool spared(Index token) const;

  const SequenceInfo& info_;
  PruningOptions options_;
  Index sinks_;
  Index text_rows_ = 0;
  std::vector<double> sums_;     ///< [P] A_j
  std::vector<double> largest_;  ///< [P] max_i a_ij
  std::vector<bool> seen_;       ///< [P] whether a text row can see the token
};

}  // namespace hae::reference
