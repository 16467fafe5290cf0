#include "sim/weights.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "sim/row_kernels.hpp"
#include "sim/row_rule.hpp"
#include "sim/text.hpp"

namespace hae {

Index weight_block_rows(const SequenceInfo& info) {
  const Index row_bytes = info.query_heads * kernels::padded(info.tokens) * Index{sizeof(float)};
  return std::clamp<Index>((Index{4} << 20) / row_bytes, 1, 96);
}

LayerWeights::LayerWeights(const SequenceInfo& info, Index layer, Index keys, LayerPayload& payload,
                           NanRule rule, std::string where)
    : info_(info),
      layer_(layer),
      payload_(payload),
      rule_(rule),
      where_(std::move(where)),
      mask_(info, layer) {
  if (info.payload == Payload::attention) {
    return;
  }
  packed_head_ = kernels::padded(keys) * *info.head_dim;
  packed_keys_.resize(at(info.kv_heads * packed_head_));
  take_keys({0, keys});
}

void LayerWeights::take_keys(Range positions) {
  const View<const float, 3> keys = payload_.keys();
  const Index head_dim = *info_.head_dim;
  HAE_EXPECTS(keys.extent(0) == info_.kv_heads && keys.extent(1) == info_.tokens &&
              keys.extent(2) == head_dim);
  const Index first =
      positions.begin / kernels::kPackedKeys * kernels::kPackedKeys;  // blocks are packed whole
  for (Index h = 0; h < info_.kv_heads; ++h) {
    kernels::pack_keys(keys[h].data() + first * head_dim, positions.end - first, head_dim,
                       packed_keys_.data() + h * packed_head_ + first * head_dim);
  }
}

void LayerWeights::prompt(Range rows, WeightBlock& block) {
  block.queries.assign(info_.prompt_rows.begin() + rows.begin, info_.prompt_rows.begin() + rows.end);
  begin(block);
  if (info_.payload == Payload::qkv) {
    recompute({block.queries.front(), block.queries.back() + 1}, block);
    throw_if_rejected();
    return;
  }
  staging_.resize(static_cast<std::size_t>(info_.query_heads * rows.size() * info_.prompt));
  const View<float, 3> stored{staging_.data(), {info_.query_heads, rows.size(), info_.prompt}};
  payload_.read_prompt_attention(rows, stored);
  for (Index h = 0; h < info_.query_heads; ++h) {
    for (Index r = 0; r < rows.size(); ++r) {
      float* row = block.weights.data() + (h * rows.size() + r) * block.stride;
      std::copy_n(stored[h][r].data(), info_.prompt, row);
      std::fill(row + info_.prompt, row + block.stride, 0.0f);
      finish_row(block, h, r);
    }
  }
  throw_if_rejected();
}

void LayerWeights::decode(Range steps, WeightBlock& block) {
  block.queries.clear();
  for (Index step = steps.begin; step < steps.end; ++step) {
    block.queries.push_back(info_.prompt + step - 1);
  }
  begin(block);
  if (info_.payload == Payload::qkv) {
    recompute({block.queries.front(), block.queries.back() + 1}, block);
    throw_if_rejected();
    return;
  }
  for (Index r = 0; r < block.rows(); ++r) {
    const Index keys = block.queries[static_cast<std::size_t>(r)] + 1;
    staging_.resize(static_cast<std::size_t>(info_.query_heads * keys));
    const View<float, 2> stored{staging_.data(), {info_.query_heads, keys}};
    payload_.read_decode_attention(steps.begin + r, stored);
    for (Index h = 0; h < info_.query_heads; ++h) {
      float* row = block.weights.data() + (h * block.rows() + r) * block.stride;
      std::copy_n(stored[h].data(), keys, row);
      std::fill(row + keys, row + block.stride, 0.0f);
      finish_row(block, h, r);
    }
  }
  throw_if_rejected();
}

void LayerWeights::begin(WeightBlock& block) {
  block.layer = layer_;
  block.query_heads = info_.query_heads;
  block.kv_heads = info_.kv_heads;
  Index keys = 0;
  block.visible.resize(block.queries.size());
  for (std::size_t r = 0; r < block.queries.size(); ++r) {
    find_visible(block.queries[r], block.visible[r]);
    keys = std::max(keys, block.visible[r].back().end);
  }
  if (info_.payload == Payload::attention) {
    keys = std::max(keys, info_.prompt);  // A stored prompt row holds P entries.
  }
  block.stride = kernels::padded(keys);
  const Index heads_rows = info_.query_heads * block.rows();
  block.weights.resize(static_cast<std::size_t>(heads_rows * block.stride));
  block.sums.resize(static_cast<std::size_t>(heads_rows));
}

void LayerWeights::find_visible(Index query, std::vector<Range>& out) const {
  mask_.visible(query, out);
  if (absent_.empty()) {
    return;
  }
  std::vector<Range> present;
  for (const Range& range : out) {
    Index begin = range.begin;
    for (auto hole = std::ranges::lower_bound(absent_, begin); hole != absent_.end() && *hole < range.end;
         ++hole) {
      if (*hole > begin) {
        present.push_back({begin, *hole});
      }
      begin = *hole + 1;
    }
    if (begin < range.end) {
      present.push_back({begin, range.end});
    }
  }
  out = std::move(present);
}

void LayerWeights::recompute(Range queries, WeightBlock& block) {
  const Index head_dim = *info_.head_dim;
  staging_.resize(static_cast<std::size_t>(info_.query_heads * queries.size() * head_dim));
  const View<float, 3> q{staging_.data(), {info_.query_heads, queries.size(), head_dim}};
  payload_.read_queries(queries, q);

  Index first = block.stride;
  Index keys = 0;
  for (const std::vector<Range>& visible : block.visible) {
    first = std::min(first, visible.front().begin / 32 * 32);
    keys = std::max(keys, visible.back().end);
  }
  const float scale = static_cast<float>(info_.scale);
  for (Index h = 0; h < info_.query_heads; ++h) {
    float* rows = block.weights.data() + h * block.rows() * block.stride;
    const float* packed = packed_keys_.data() + h / info_.group_heads() * packed_head_ + first * head_dim;
    kernels::logits(q[h].data(), block.rows(), head_dim, packed, keys - first, head_dim, scale, rows + first,
                    block.stride);
    for (Index r = 0; r < block.rows(); ++r) {
      softmax_numerators(rows + r * block.stride, block.visible[static_cast<std::size_t>(r)], h,
                         block.queries[static_cast<std::size_t>(r)]);
      if (!sizes_.empty()) {
        multiply_by_sizes(rows + r * block.stride, block.visible[at(r)], h / info_.group_heads());
      }
      finish_row(block, h, r);
    }
  }
}

void LayerWeights::multiply_by_sizes(float* row, const std::vector<Range>& visible, Index kv_head) const {
  for (const Range& range : visible) {
    for (Index j = range.begin; j < range.end; ++j) {
      row[j] *= sizes_[kv_head][j];
    }
  }
}

void LayerWeights::softmax_numerators(float* row, const std::vector<Range>& visible, Index head,
                                      Index query) {
  float largest = -std::numeric_limits<float>::infinity();
  bool finite = true;
  for (const Range& range : visible) {
    const kernels::Maximum part = kernels::maximum(row, range.begin, range.end);
    largest = std::max(largest, part.value);
    finite = finite && part.finite;
  }
  std::vector<Index> lowered;
  if (!finite) {
    largest = -std::numeric_limits<float>::infinity();
    for (const Range& range : visible) {
      for (Index j = range.begin; j < range.end; ++j) {
        if (std::isfinite(row[j])) {
          largest = std::max(largest, row[j]);
          continue;
        }
        if (rule_ == NanRule::error) {
          reject(
              head, query,
              "the logit of key " + std::to_string(j) + " is " + shortest(row[j]) +
                  ", expected a finite number; record again, or count such weights as 0 with --nan=lowest");
          return;
        }
        lowered.push_back(j);
        row[j] = 0.0f;
      }
    }
    if (!std::isfinite(largest)) {
      largest = 0.0f;  // Every logit of the row was lowered: its weights become 0 below.
    }
    for (const Index j : lowered) {
      row[j] = largest;
    }
  }
  for (const Range& range : visible) {
    kernels::exponentials(row, range.begin, range.end, largest);
  }
  for (const Index j : lowered) {
    row[j] = 0.0f;
  }
  lowered_ += static_cast<Index>(lowered.size());
}

void LayerWeights::check_probabilities(std::span<float> row, std::span<const Range> visible, Index head,
                                       Index query) {
  Index lowered = 0;
  for (float& weight : row) {
    if (rule_ == NanRule::lowest && !std::isfinite(weight)) {
      weight = 0.0f;
      ++lowered;
    }
  }
  lowered_ += lowered;
  // A row that lost such a weight cannot be held to its sum any more.
  const std::optional<double> tolerance =
      lowered == 0 ? std::optional(info_.row_sum_tolerance) : std::nullopt;
  const std::optional<RowViolation> violation = find_row_violation(row, visible, tolerance);
  if (!violation) {
    return;
  }
  const auto expected = [&](const char* what) {
    const std::string value =
        std::to_string(violation->key) + " is " + shortest(row[static_cast<std::size_t>(violation->key)]);
    reject(head, query, "the probability of key " + value + ", expected " + what);
  };
  switch (violation->kind) {
    case RowViolation::Kind::not_finite:
      expected("a finite number; record again, or count such weights as 0 with --nan=lowest");
      break;
    case RowViolation::Kind::negative:
      expected("0 or more; record again");
      break;
    case RowViolation::Kind::forbidden:
      expected("0: the mask forbids it; correct the mask rule, or record again");
      break;
    case RowViolation::Kind::sum:
      reject(head, query,
             "the row sums to " + shortest(violation->sum) + ", expected 1 ± " +
                 shortest(info_.row_sum_tolerance) + "; record again");
  }
}

void LayerWeights::finish_row(WeightBlock& block, Index head, Index row) {
  float* weights = block.weights.data() + (head * block.rows() + row) * block.stride;
  const std::vector<Range>& visible = block.visible[static_cast<std::size_t>(row)];
  if (info_.payload == Payload::attention) {
    check_probabilities({weights, static_cast<std::size_t>(block.stride)}, visible, head,
                        block.queries[static_cast<std::size_t>(row)]);
  } else {
    Index begin = 0;
    for (const Range& range : visible) {
      std::fill(weights + begin, weights + range.begin, 0.0f);
      begin = range.end;
    }
    std::fill(weights + begin, weights + block.stride, 0.0f);
  }
  const float sum = kernels::sum(weights, block.stride);
  block.sums[static_cast<std::size_t>(head * block.rows() + row)] = sum;
  masked_rows_ += sum == 0.0f ? 1 : 0;
}

void LayerWeights::reject(Index head, Index query, const std::string& message) {
  if (!rejected_ || std::pair(query, head) < std::pair(rejected_->query, rejected_->head)) {
    rejected_ = {query, head, message};
  }
}

void LayerWeights::throw_if_rejected() const {
  if (rejected_) {
    throw TraceError(where_ + ", layer " + std::to_string(layer_) + ", head " +
                     std::to_string(rejected_->head) + ", row " + std::to_string(rejected_->query) + ": " +
                     rejected_->message);
  }
}

}  // namespace hae
