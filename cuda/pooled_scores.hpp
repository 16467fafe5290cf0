#pragma once

#include "cuda/memory.hpp"
#include "sim/rows.hpp"

namespace hae::device {

/// How SnapKV (arXiv 2404.14469) makes scores of KV heads from the attention that each query head's last rows
/// pay: pooled over neighbours, then reduced over the heads of the group.
struct Pooling {
  Index kernel = 1;            ///< odd: neighbours that become one
  bool takes_maximum = false;  ///< else their mean, which counts zeros beyond both ends
  HeadReduction group = HeadReduction::mean;
  double rows = 1;  ///< the sums are divided by this first; 1: not at all
};

/// sums    [items, query_heads, stride]
/// counts  [items] the first tokens, which are pooled; what comes after them is only reduced
/// scores  [items, kv_heads, stride]
/// order   neighbours ascending, then query heads ascending, in double
void pool_scores(const double* sums, Index items, Index query_heads, Index kv_heads, Index stride,
                 const Index* counts, const Pooling& pooling, double* scores, Stream stream);

}  // namespace hae::device
