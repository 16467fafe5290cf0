#include "cuda/layer_batch.hpp"

#include <algorithm>

#include "sim/row_kernels.hpp"

namespace hae::device {

Index BatchShape::item_bytes() const {
  const Index vectors = (query_heads + 2 * kv_heads) * stride * head_dim * Index{sizeof(float)};
  const Index rows_of_heads = query_heads * rows;
  return vectors + rows_of_heads * (stride + 2) * Index{sizeof(float)} + row_workspace_bytes(rows_of_heads) +
         (stride + rows) * Index{sizeof(Index)} + Index{sizeof(LayerMask)};
}

LayerBatch::LayerBatch(std::vector<BatchItem> items, const BatchShape& shape, NanRule nan, Stream stream)
    : items_(std::move(items)),
      shape_(shape),
      nan_(nan),
      stream_(stream),
      queries_host_(at(std::ssize(items_) * shape.rows)),
      images_(std::ssize(items_) * shape.stride),
      masks_(std::ssize(items_)),
      queries_(std::ssize(items_) * shape.rows),
      scales_(std::ssize(items_)),
      query_vectors_(std::ssize(items_) * shape.query_heads * shape.stride * shape.head_dim),
      packed_keys_(std::ssize(items_) * shape.kv_heads * shape.stride * shape.head_dim),
      weights_(std::ssize(items_) * shape.query_heads * shape.rows * shape.stride),
      sums_(std::ssize(items_) * shape.query_heads * shape.rows),
      divisors_(std::ssize(items_) * shape.query_heads * shape.rows),
      is_bad_(std::ssize(items_)),
      workspace_(row_workspace_bytes(std::ssize(items_) * shape.query_heads * shape.rows)) {
  std::vector<LayerMask> masks;
  std::vector<float> scales;
  is_bad_.clear(stream);
  for (Index i = 0; i < this->items(); ++i) {
    const SequenceInfo& sequence = info(i);
    const MaskRule& rule = sequence.masks[at(items_[at(i)].layer)];
    masks.push_back({sequence.prompt, rule.window, rule.bidirectional, images_.data() + i * shape.stride});
    scales.push_back(static_cast<float>(sequence.scale));
    images_.write(sequence.image, i * shape.stride, stream);
    upload(i);
  }
  masks_.write(masks, stream);
  scales_.write(scales, stream);
}

void LayerBatch::upload(Index item) {
  const SequenceInfo& sequence = info(item);
  std::unique_ptr<LayerPayload> payload = items_[at(item)].sequence->layer(items_[at(item)].layer);
  if (shape_.payload == Payload::attention) {
    recorded_.push_back(std::make_unique<LayerWeights>(sequence, items_[at(item)].layer, sequence.tokens,
                                                       *payload, nan_, items_[at(item)].where));
    payloads_.push_back(std::move(payload));
    return;
  }
  std::vector<float> queries(at(shape_.query_heads * sequence.tokens * shape_.head_dim));
  payload->read_queries({0, sequence.tokens},
                        {queries.data(), {shape_.query_heads, sequence.tokens, shape_.head_dim}});
  const Index row = shape_.stride * shape_.head_dim;  // of one head
  for (Index head = 0; head < shape_.query_heads; ++head) {
    const Index length = sequence.tokens * shape_.head_dim;
    query_vectors_.write({queries.data() + head * length, at(length)},
                         (item * shape_.query_heads + head) * row, stream_);
  }
  const View<const float, 3> keys = payload->keys();
  HAE_EXPECTS(keys.extent(0) == shape_.kv_heads && keys.extent(1) == sequence.tokens &&
              keys.extent(2) == shape_.head_dim);
  Array<float> unpacked(keys.size());
  unpacked.write({keys.data(), at(keys.size())}, stream_);
  pack_keys(unpacked.data(), shape_.kv_heads, sequence.tokens, shape_.head_dim, shape_.stride,
            packed_keys_.data() + item * shape_.kv_heads * row, stream_);
  synchronize(stream_);  // before the unpacked keys go
}

RowBlock LayerBatch::form_prompt(const std::vector<Index>& first, Index begin,
                                 const std::function<bool(Index item, Index position)>& wants) {
  Index keys = 0;
  for (Index i = 0; i < items(); ++i) {
    const SequenceInfo& sequence = info(i);
    for (Index row = 0; row < shape_.rows; ++row) {
      const Index index = first[at(i)] + begin + row;
      const bool is_there = index < std::ssize(sequence.prompt_rows);
      const Index position = is_there ? sequence.prompt_rows[at(index)] : -1;
      queries_host_[at(i * shape_.rows + row)] = is_there && wants(i, position) ? position : -1;
    }
    keys = std::max(keys, sequence.prompt);  // A picture's tokens see later ones.
  }
  const RowBlock block = form(keys);
  if (shape_.payload == Payload::attention) {
    for (Index i = 0; i < items(); ++i) {
      const Index stored = std::ssize(info(i).prompt_rows);
      const Range rows{std::min(stored, first[at(i)] + begin),
                       std::min(stored, first[at(i)] + begin + shape_.rows)};
      WeightBlock recorded;
      if (rows.size() > 0) {
        recorded_[at(i)]->prompt(rows, recorded);
        carry(i, recorded, block);
      }
    }
    sum_weights(block, workspace_.data(), stream_);
  }
  return block;
}

RowBlock LayerBatch::form_decode(Index begin) {
  Index keys = 0;
  for (Index i = 0; i < items(); ++i) {
    for (Index row = 0; row < shape_.rows; ++row) {
      const bool is_there = begin + row <= info(i).steps();
      const Index position = is_there ? info(i).prompt + begin + row - 1 : -1;
      queries_host_[at(i * shape_.rows + row)] = position;
      keys = std::max(keys, position + 1);
    }
  }
  const RowBlock block = form(keys);
  if (shape_.payload == Payload::attention) {
    for (Index i = 0; i < items(); ++i) {
      const Range steps{begin, std::min(info(i).steps() + 1, begin + shape_.rows)};
      WeightBlock recorded;
      if (steps.size() > 0) {
        recorded_[at(i)]->decode(steps, recorded);
        carry(i, recorded, block);
      }
    }
    sum_weights(block, workspace_.data(), stream_);
  }
  return block;
}

/// The block of the queries that were listed; recomputed where Q and K are there.
RowBlock LayerBatch::form(Index keys) {
  queries_.write(queries_host_, stream_);
  const RowBlock block{.items = items(),
                       .query_heads = shape_.query_heads,
                       .kv_heads = shape_.kv_heads,
                       .rows = shape_.rows,
                       .active = {0, shape_.rows},
                       .keys = kernels::padded(keys),
                       .queries = queries_.data(),
                       .masks = masks_.data(),
                       .weights = weights_.data(),
                       .sums = sums_.data()};
  if (shape_.payload == Payload::qkv) {
    form_weights(block,
                 {.head_dim = shape_.head_dim,
                  .tokens = shape_.stride,
                  .packed_tokens = shape_.stride,
                  .queries = query_vectors_.data(),
                  .keys = packed_keys_.data(),
                  .scales = scales_.data()},
                 workspace_.data(), is_bad_.data(), stream_);
  }
  return block;
}

/// Copies recorded rows to their places in the block.
void LayerBatch::carry(Index item, const WeightBlock& recorded, const RowBlock& block) {
  const Index item_size = shape_.query_heads * shape_.rows * block.keys;
  weights_host_.assign(at(item_size), 0.0f);
  const Index keys = std::min(recorded.stride, block.keys);
  for (Index head = 0; head < shape_.query_heads; ++head) {
    for (Index row = 0; row < recorded.rows(); ++row) {
      std::copy_n(recorded.row(head, row), keys,
                  weights_host_.begin() + (head * shape_.rows + row) * block.keys);
    }
  }
  weights_.write(weights_host_, item * item_size, stream_);
}

void LayerBatch::expect_finite() const {
  if (nan_ == NanRule::lowest || shape_.payload == Payload::attention) {
    return;
  }
  const std::vector<std::uint8_t> is_bad = is_bad_.read(stream_);
  for (Index i = 0; i < items(); ++i) {
    if (is_bad[at(i)] == 0) {
      continue;
    }
    // The engine's own reading names the head, the row and the key.
    const SequenceInfo& sequence = info(i);
    const std::unique_ptr<LayerPayload> payload = items_[at(i)].sequence->layer(items_[at(i)].layer);
    LayerWeights weights(sequence, items_[at(i)].layer, sequence.tokens, *payload, nan_, items_[at(i)].where);
    WeightBlock block;
    const Index rows = weight_block_rows(sequence);
    const Index stored = std::ssize(sequence.prompt_rows);
    for (Index begin = 0; begin < stored; begin += rows) {
      weights.prompt({begin, std::min(stored, begin + rows)}, block);
    }
    for (Index begin = 1; begin <= sequence.steps(); begin += rows) {
      weights.decode({begin, std::min(sequence.steps() + 1, begin + rows)}, block);
    }
    throw DeviceError(items_[at(i)].where + ", layer " + std::to_string(items_[at(i)].layer) +
                      ": the device found a logit that is not finite, and the engine finds none: the device "
                      "does not compute what it should");
  }
}

}  // namespace hae::device
