#pragma once

#include <vector>

#include "reference/selection.hpp"
#include "sim/policy.hpp"

namespace hae::reference {

/// How a policy scores tokens.
struct ScoreOptions {
  Reduction reduction;

  /// sum: what a token received from all rows (the paper). mean: per observed row that could see it, because
  /// a sum favours old tokens, which more rows could see.
  enum class Over { sum, mean } over = Over::sum;
};

/// Cumulative attention of every token of one layer.
///
///   s[lane, j] = Σ_i row_value[lane, i, j]                 HAE Eq. (5), arXiv 2602.02197; prefill rows: its
///   β
///
/// order   rows ascending, in double (the order inside a row value: sim/rows.hpp)
class CumulativeScores {
 public:
  CumulativeScores(const SequenceInfo& info, const ScoreOptions& options);

  /// Adds rows, in order.
  void observe(const Rows& rows);

  /// The sum, or the sum divided once by the exposures: observed queries whose mask allows the token, its own
  /// included, whatever mass was left for it.
  [[nodiscard]] double score(Index lane, Index token) const;

  /// Adds the evictions of the `count` lowest eligible tokens of a lane to a decision.
  void evict_lowest(const LayerCache& cache, Index layer, Index lane, const Limits& limits, Index count,
                    Decision& decision) const;

  /// The `count` lowest of the tokens.
  [[nodiscard]] std::vector<Scored> lowest(Index lane, const std::vector<Index>& tokens, Index count) const;

 private:
  ScoreOptions options_;
  std::vector<std::vector<double>> sums_;  ///< [lanes][padded T]
  std::vector<Index> exposures_;           ///< [T]
};

}  // namespace hae::reference
