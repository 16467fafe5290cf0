#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sim/mask.hpp"
#include "sim/rows.hpp"
#include "sim/trace.hpp"

namespace hae {

/// What to do with a weight that is NaN or infinite.
enum class NanRule {
  error,   ///< TraceError that names the place
  lowest,  ///< the weight counts as +0, and is counted
};

/// Query rows whose weights fill about 4 MiB: how many to form at a time.
Index weight_block_rows(const SequenceInfo& info);

/// Forms the full-cache weights of one layer: recomputed from Q and K by the canonical arithmetic, or read.
class LayerWeights {
 public:
  /// keys   one past the last key that any row asked for will see: P for the prompt, T for decoding
  /// where  begins the message of a TraceError, e.g. `trace.h5: sequence 'board 3'`
  LayerWeights(const SequenceInfo& info, Index layer, Index keys, LayerPayload& payload, NanRule rule,
               std::string where);

  /// Takes the payload's keys of these positions: what a payload that grows has since the last time. Before
  /// that they count as zeros.
  void take_keys(Range positions);

  /// Prompt positions that no row sees, ascending: a running model has no keys there. Their own rows must not
  /// be asked for.
  void leave_out(std::vector<Index> absent) { absent_ = std::move(absent); }

  /// Multiplies the weight of each key in each row by its size, which adds ln size to its logit.
  ///
  /// sizes  [kv_heads, T]; qkv only
  void scale_by(View<const float, 2> sizes) { sizes_ = sizes; }

  /// Stored prompt rows with indices `rows` into SequenceInfo::prompt_rows.
  ///
  /// throws  TraceError that names the first wrong row and, in it, the first head and key: among several the
  ///         size of a block does not choose
  void prompt(Range rows, WeightBlock& block);

  /// Rows of decode steps [steps.begin, steps.end), steps counted from 1.
  ///
  /// throws  TraceError as prompt() does
  void decode(Range steps, WeightBlock& block);

  /// NaN and infinite weights that counted as +0 so far.
  [[nodiscard]] Index lowered() const { return lowered_; }

  /// Rows without any mass so far.
  [[nodiscard]] Index masked_rows() const { return masked_rows_; }

 private:
  struct Rejected {
    Index query;
    Index head;
    std::string message;
  };

  void begin(WeightBlock& block);
  void find_visible(Index query, std::vector<Range>& out) const;
  void recompute(Range queries, WeightBlock& block);
  void finish_row(WeightBlock& block, Index head, Index row);
  void softmax_numerators(float* row, const std::vector<Range>& visible, Index head, Index query);
  void multiply_by_sizes(float* row, const std::vector<Range>& visible, Index kv_head) const;
  void check_probabilities(std::span<float> row, std::span<const Range> visible, Index head, Index query);
  void reject(Index head, Index query, const std::string& message);
  void throw_if_rejected() const;

  const SequenceInfo& info_;
  Index layer_;
  LayerPayload& payload_;
  NanRule rule_;
  std::string where_;
  Mask mask_;
  std::vector<float> packed_keys_;  ///< [kv_heads, ceil(keys / 32), head_dim, 32]
  Index packed_head_ = 0;           ///< elements of one KV head in packed_keys_
  std::vector<Index> absent_;
  View<const float, 2> sizes_;
  std::vector<float> staging_;
  std::optional<Rejected> rejected_;  ///< of the rows read, the first by (query, head) that is wrong
  Index lowered_ = 0;
  Index masked_rows_ = 0;
};

}  // namespace hae
