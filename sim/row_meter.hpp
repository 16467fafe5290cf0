#pragma once

#include <span>
#include <utility>
#include <vector>

#include "sim/rows.hpp"
#include "sim/trace.hpp"

namespace hae {

/// Measures rows of one layer against what a cache evicted (definitions: sim/metrics.hpp).
class RowMeter {
 public:
  /// values  [kv_heads, T, head_dim], or empty: then there are no output errors and no pulls
  RowMeter(const SequenceInfo& info, View<const float, 3> values);

  /// Forgets the outputs and pulls of an earlier block. Call before measuring rows of a block.
  void begin() {
    outputs_formed_ = false;
    top_row_ = -1;
  }

  /// The metrics of one query head's row; NaN where the row is not in a metric's population.
  struct Measured {
    double missed_mass;
    double missed_pull;
    double kl;
    double output_error;
    double output_error_relative;
    bool removed_all;  ///< had mass and lost all of it
  };

  /// Measures all query heads of one row; valid until the next call.
  std::span<const Measured> measure(const Rows& rows, Index row);

  /// Measures all query heads of one row of a run that merges: the output over its own residents against that
  /// over all keys. There are no other metrics. Valid until the next call.
  ///
  /// full    the same query over all keys, of the block that begin() was called for
  /// own     the row over merged keys
  /// values  [kv_heads, T, head_dim] merged
  std::span<const Measured> measure_merged(const Rows& full, Index full_row, const Rows& own, Index own_row,
                                           View<const float, 3> values);

  /// Mass outside each query head's n largest probabilities, n the smaller of its lane's residents and the
  /// keys its mask allows; NaN for a masked row. Among equal ones the newer counts as larger. Valid until the
  /// next call.
  std::span<const double> top_now(const Rows& rows, Index row);

 private:
  /// A row's weights by their upper bits: what several selections of its largest share.
  struct Histogram {
    std::vector<Index> counts;                      ///< [kBins]
    std::vector<std::pair<Index, double>> outside;  ///< known answers, by how many stay
  };

  void count_weights(const WeightBlock& block, Index row);
  double outside_largest(Histogram& histogram, const float* weights, std::span<const Range> visible,
                         Index count, double all, Index stride);
  void form_outputs(const WeightBlock& block);
  void measure_merged_head(const Rows& full, Index full_row, const Rows& own, Index own_row,
                           View<const float, 3> values, Index head);
  void measure_outputs(const Rows& rows, Index row, Index kv_head);
  void measure_pulls(const WeightBlock& block, Index block_row, Index first_head);
  void measure_outputs_of(const Rows& rows, Index row, Index kv_head, const std::vector<Index>& heads,
                          const std::vector<Index>& tokens, bool complement);

  const SequenceInfo& info_;
  View<const float, 3> values_;
  bool outputs_formed_ = false;
  std::vector<double> outputs_;  ///< [query_heads, rows, head_dim] full-cache outputs of the block
  std::vector<double> pulls_;    ///< [query_heads, rows, stride] squared pulls of its keys, by position
  std::vector<Measured> measured_;
  std::vector<Index> evicted_;
  std::vector<Index> resident_;
  std::vector<double> missed_pulls_;  ///< [group heads]
  std::vector<Index> by_complement_;  ///< heads whose o' is formed from what was evicted
  std::vector<Index> by_residents_;
  std::vector<double> coefficients_;
  std::vector<double> partial_;
  std::vector<double> top_now_;
  Index top_row_ = -1;                 ///< the block's row that histograms_ are of
  std::vector<Histogram> histograms_;  ///< [query_heads]
  std::vector<float> candidates_;
  std::vector<float> top_;
};

}  // namespace hae
