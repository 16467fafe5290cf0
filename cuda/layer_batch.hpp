#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/row_weights.hpp"
#include "sim/weights.hpp"

namespace hae::device {

/// One layer of one sequence.
struct BatchItem {
  Sequence* sequence = nullptr;
  Index layer = 0;
  std::string where;  ///< begins the message of an error: file and sequence
};

/// What layers must share to be on the device together, and how large the largest of them is.
struct BatchShape {
  Payload payload = Payload::qkv;
  Index query_heads = 0;
  Index kv_heads = 0;
  Index head_dim = 0;  ///< 0 for recorded attention
  Index stride = 0;    ///< tokens of the longest, rounded up to 32
  Index rows = 0;      ///< formed at a time

  /// Bytes on the device for each layer.
  [[nodiscard]] Index item_bytes() const;
};

/// Layers of sequences on the device, whose rows of weights are formed block by block: recomputed there from
/// Q and K by the canonical arithmetic, or read, checked and carried over.
class LayerBatch {
 public:
  LayerBatch(std::vector<BatchItem> items, const BatchShape& shape, NanRule nan, Stream stream);

  [[nodiscard]] Index items() const { return std::ssize(items_); }
  [[nodiscard]] const BatchShape& shape() const { return shape_; }

  /// Prompt rows: of each item those with indices [first + begin, first + begin + shape.rows) into its
  /// SequenceInfo::prompt_rows, as far as there are such, and `wants` their positions.
  ///
  /// first   [items]
  /// throws  TraceError for recorded probabilities that break the format
  RowBlock form_prompt(const std::vector<Index>& first, Index begin,
                       const std::function<bool(Index item, Index position)>& wants);

  /// Rows of the decode steps [begin, begin + shape.rows), counted from 1, as far as an item has them.
  RowBlock form_decode(Index begin);

  /// Canonical sums over all keys of the last block, and memory for those over residents.
  [[nodiscard]] void* workspace() const { return workspace_.data(); }
  [[nodiscard]] float* divisors() const { return divisors_.data(); }

  /// throws  with NanRule::error, for the first layer in which a logit was not finite, TraceError that names
  ///         the place
  void expect_finite() const;

 private:
  [[nodiscard]] const SequenceInfo& info(Index item) const { return items_[at(item)].sequence->info(); }
  void upload(Index item);
  RowBlock form(Index keys);
  void carry(Index item, const WeightBlock& recorded, const RowBlock& block);

  std::vector<BatchItem> items_;
  BatchShape shape_;
  NanRule nan_;
  Stream stream_;
  std::vector<std::unique_ptr<LayerPayload>> payloads_;  ///< recorded attention
  std::vector<std::unique_ptr<LayerWeights>> recorded_;  ///< recorded attention
  std::vector<Index> queries_host_;                      ///< [items, rows]
  std::vector<float> weights_host_;                      ///< recorded attention: those of a block

  Array<Index> images_;     ///< [items, stride]
  Array<LayerMask> masks_;  ///< [items]
  Array<Index> queries_;    ///< [items, rows]
  Array<float> scales_;     ///< [items]
  Array<float> query_vectors_;
  Array<float> packed_keys_;
  Array<float> weights_;
  Array<float> sums_;
  Array<float> divisors_;
  Array<std::uint8_t> is_bad_;  ///< [items]
  Buffer workspace_;
};

}  // namespace hae::device
