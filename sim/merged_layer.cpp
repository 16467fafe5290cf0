#include "sim/merged_layer.hpp"

#include <map>

namespace hae {
namespace {

std::vector<float> copy_of(const View<const float, 3>& vectors) {
  return {vectors.data(), vectors.data() + vectors.size()};
}

}  // namespace

MergedLayer::MergedLayer(const SequenceInfo& info, Index layer, LayerPayload& payload, LaneKind lanes,
                         std::span<const Evict> merged, Index keys, std::vector<Index> absent, NanRule nan,
                         const std::string& where)
    : info_(info),
      payload_(payload),
      keys_(copy_of(payload.keys())),
      values_(copy_of(payload.values())),
      sizes_(at(info.kv_heads * info.tokens), 1.0f) {
  HAE_EXPECTS(info.payload == Payload::qkv && info.has_values);
  for (Index kv_head = 0; kv_head < info.kv_heads; ++kv_head) {
    const Index lane = lanes == LaneKind::layer ? 0 : kv_head;
    std::map<Index, std::vector<const Evict*>> by_target;
    for (const Evict& evict : merged) {
      if (evict.lane == Evict::kEveryLane || evict.lane == lane) {
        by_target[evict.merge->into].push_back(&evict);
      }
    }
    for (const auto& [into, evicted] : by_target) {
      merge(kv_head, into, evicted);
    }
  }
  weights_ = std::make_unique<LayerWeights>(info, layer, keys, *this, nan, where);
  weights_->leave_out(std::move(absent));
  weights_->scale_by({sizes_.data(), {info.kv_heads, info.tokens}});
}

void MergedLayer::merge(Index kv_head, Index into, std::span<const Evict* const> evicted) {
  const Merge& first = *evicted.front()->merge;
  for (const Evict* evict : evicted) {
    HAE_EXPECTS(evict->merge->kept_weight == first.kept_weight && evict->merge->size == first.size);
  }
  merge_vectors(keys_, kv_head, into, evicted);
  merge_vectors(values_, kv_head, into, evicted);
  sizes_[at(kv_head * info_.tokens + into)] = static_cast<float>(first.size);
}

void MergedLayer::merge_vectors(std::vector<float>& vectors, Index kv_head, Index into,
                                std::span<const Evict* const> evicted) const {
  const Index head_dim = *info_.head_dim;
  const auto vector = [&](Index token) {
    return vectors.data() + (kv_head * info_.tokens + token) * head_dim;
  };
  for (Index i = 0; i < head_dim; ++i) {
    double sum = evicted.front()->merge->kept_weight * static_cast<double>(vector(into)[i]);
    for (const Evict* evict : evicted) {
      sum += evict->merge->weight * static_cast<double>(vector(evict->token)[i]);
    }
    vector(into)[i] = static_cast<float>(sum);
  }
}

void MergedLayer::read_prompt_attention(Range /*rows*/, View<float, 3> /*out*/) {
  HAE_EXPECTS(false);
}

void MergedLayer::read_decode_attention(Index /*step*/, View<float, 2> /*out*/) {
  HAE_EXPECTS(false);
}

}  // namespace hae
