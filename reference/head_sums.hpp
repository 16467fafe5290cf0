#pragma once

#include <vector>

#include "sim/policy.hpp"

namespace hae::reference {

/// One number a token, for each query head or each lane: [heads or lanes][P].
using TokenScores = std::vector<std::vector<double>>;

/// Attention that each prompt token receives from prompt rows, by query head.
///
///   S_h[j] = Σ_i a'_h[i, j]     over the last `newest` prompt rows, or over all
///
/// order  rows ascending, in double
class HeadSums {
 public:
  /// newest  rows that count: those of queries P - newest and later
  HeadSums(const SequenceInfo& info, Index newest);

  void observe(const Rows& rows);
  [[nodiscard]] const TokenScores& sums() const { return sums_; }

 private:
  Index first_query_;
  TokenScores sums_;
};

/// Mean, maximum or sum over the query heads of each KV head, heads ascending: [query_heads][P] to
/// [kv_heads][P].
TokenScores reduce_groups(const TokenScores& by_head, const SequenceInfo& info, HeadReduction group);

/// How a pool of neighbours becomes one number.
enum class Pool { mean, max };

/// Each of the first `count` numbers of a row becomes the mean or the maximum of the `kernel` ones around it.
/// Beyond both ends, a mean counts zeros and still divides by `kernel`; a maximum counts nothing.
///
/// kernel  odd
/// order   ascending, in double
void pool_neighbours(TokenScores& scores, Index count, Index kernel, Pool pool);

}  // namespace hae::reference
