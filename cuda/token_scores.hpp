#pragma once

#include "cuda/row_weights.hpp"
#include "sim/rows.hpp"

namespace hae::device {

/// How the rows of a block become rows of values, one a lane: sim/rows.hpp's Rows::values.
///
///   a_j = w_j / divisor, 0 in a head whose divisor is 0, and 0 for evicted tokens where residents are given
///   value_j = (sum of double(a_j) over the lane's query heads, ascending) / heads, or the sum, or the
///   maximum
struct RowValues {
  HeadReduction heads = HeadReduction::mean;
  const float* divisors = nullptr;  ///< [items, query_heads, rows] sums over residents, or over all keys

  /// [items, resident_lanes, stride] 1 where a lane holds the token; null: every key counts.
  const std::uint8_t* resident = nullptr;
  Index resident_lanes = 1;
  Index stride = 0;  ///< of residents and scores
};

/// Cumulative attention of every token: the prefill's sums row block by row block, and with one row the
/// update of a decode step.
///
///   s[item, lane, j] += Σ_rows value_j                     HAE Eq. (5), arXiv 2602.02197
///
/// lanes      that divide the query heads in order: 1, the KV heads, or every query head on its own
/// scores     [items, lanes, stride] double
/// exposures  [items, stride] += rows whose mask allows the token; null: not counted
/// order      rows ascending, in double
void add_rows(const RowBlock& block, const RowValues& values, Index lanes, double* scores, Index* exposures,
              Stream stream);

/// What DAP needs of the prompt's text rows, HAE Eq. (1)-(2): over the rows of the block,
///
///   A_j += a_ij      m_j = max(m_j, a_ij)      seen_j = 1 where the mask allows j
///
/// a_ij: value_j with all query heads of the item as one lane.
///
/// sums, largest  [items, stride]
/// seen           [items, stride]
/// order          rows ascending, in double
void add_text_rows(const RowBlock& block, const RowValues& values, double* sums, double* largest,
                   std::uint8_t* seen, Stream stream);

/// ranking[item, lane, j] = scores / exposures, one double division; 0 where a token was never exposed.
void divide_by_exposures(const double* scores, const Index* exposures, Index items, Index lanes, Index stride,
                         double* ranking, Stream stream);

}  // namespace hae::device
