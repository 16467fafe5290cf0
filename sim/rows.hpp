#pragma once

#include <map>
#include <span>
#include <vector>

#include "sim/cache.hpp"
#include "sim/trace.hpp"

namespace hae {

/// Weights of some queries of one layer over their full key sets, before any eviction: computed once, shared
/// by every run.
///
/// weights  [query_heads, rows, stride]  w_j; zero where the mask forbids; by position, padded to 32
/// sums     [query_heads, rows]          canonical sum of w over all keys; 0 for a masked row
struct WeightBlock {
  Index layer = 0;
  Index query_heads = 0;
  Index kv_heads = 0;
  Index stride = 0;
  std::vector<Index> queries;               ///< [rows] positions, ascending
  std::vector<std::vector<Range>> visible;  ///< [rows] keys each query sees
  std::vector<float> weights;
  std::vector<float> sums;

  [[nodiscard]] Index rows() const { return static_cast<Index>(queries.size()); }
  [[nodiscard]] const float* row(Index head, Index row) const {
    return weights.data() + (head * rows() + row) * stride;
  }
  [[nodiscard]] float sum(Index head, Index row) const {
    return sums[static_cast<std::size_t>(head * rows() + row)];
  }
};

/// Splits ascending positions where they are not neighbours, and after `most` of them: ranges of indices into
/// `positions`. Rows of a block are neighbours; tokens that left a prefill divide them.
std::vector<Range> neighbours(std::span<const Index> positions, Index most);

/// Which probabilities a score is made of: what a real cache would see (a'), or what the theory assumes (a).
enum class Attention { observed, full };

/// How the query heads of a lane become one row.
enum class HeadReduction { mean, max, sum };

/// One way to turn the heads of a layer into rows of values.
struct Reduction {
  LaneKind lanes = LaneKind::layer;  ///< reduce over all query heads, or over the group of each KV head
  HeadReduction heads = HeadReduction::mean;
  Attention attention = Attention::observed;

  auto operator<=>(const Reduction&) const = default;
};

/// What a policy observes: attention of some queries over the residents of a cache. Values are formed when
/// asked for and shared by all runs whose caches hold the same tokens.
class Rows {
 public:
  /// The listed rows of a block, over the tokens that `keep` holds: one array a lane, or one for all lanes.
  Rows(const WeightBlock& block, std::vector<Index> rows, std::vector<std::span<const float>> keep);

  [[nodiscard]] Index layer() const { return block_.layer; }
  [[nodiscard]] Index rows() const { return static_cast<Index>(rows_.size()); }

  /// Position of a row's query.
  [[nodiscard]] Index query(Index row) const { return block_.queries[block_row(row)]; }

  /// Keys that a row's query sees by the mask, resident or not.
  [[nodiscard]] std::span<const Range> visible(Index row) const { return block_.visible[block_row(row)]; }

  /// One row of one lane: (sum over its query heads, ascending, of double(a'))/heads, or their maximum or
  /// sum.
  ///
  ///   a'_j = w_j / (sum of w over residents), 0 for evicted tokens and in a head that has no mass left
  ///   a_j  = w_j / (sum of w over all keys)     with Attention::full
  ///
  /// returns [keys] by position, keys at least one past the last visible one
  [[nodiscard]] std::span<const double> values(const Reduction& reduction, Index lane, Index row) const;

  /// One row of one query head: values() with nothing to reduce.
  [[nodiscard]] std::span<const double> head(Attention attention, Index query_head, Index row) const;

 private:
  friend class RowMeter;  // measures on the full-cache weights, which a policy must not see

  [[nodiscard]] const WeightBlock& block() const { return block_; }
  [[nodiscard]] std::size_t block_row(Index row) const {
    return static_cast<std::size_t>(rows_[static_cast<std::size_t>(row)]);
  }
  [[nodiscard]] const float* keep_of_head(Index head) const;
  [[nodiscard]] float resident_sum(Index head, Index row) const;
  void reduce(const Reduction& reduction, std::vector<double>& out) const;
  void add_head(Attention attention, HeadReduction heads, Index query_head, Index row, double* total) const;

  const WeightBlock& block_;
  std::vector<Index> rows_;
  std::vector<std::span<const float>> keep_;
  mutable std::vector<float> everything_;     ///< [stride] ones, for rows over all keys
  mutable std::vector<float> resident_sums_;  ///< [query_heads, rows], formed on first use
  mutable std::map<Reduction, std::vector<double>> values_;
  mutable std::map<Attention, std::vector<double>> heads_;  ///< [query_heads, rows, stride]
};

}  // namespace hae
