#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sim/policy.hpp"
#include "sim/weights.hpp"

namespace hae {

/// One layer as a run that merges sees it: its keys and values are copies into which evicted ones went, and
/// its rows are formed from them.
class MergedLayer final : public LayerPayload {
 public:
  /// payload  qkv, with values; it must outlive this
  /// lanes    of the policy
  /// merged   the layer's merges, ascending by token
  /// keys     as LayerWeights takes it
  /// absent   prompt positions that no row sees, ascending
  MergedLayer(const SequenceInfo& info, Index layer, LayerPayload& payload, LaneKind lanes,
              std::span<const Evict> merged, Index keys, std::vector<Index> absent, NanRule nan,
              const std::string& where);

  [[nodiscard]] View<const float, 3> keys() override { return view(keys_); }
  [[nodiscard]] View<const float, 3> values() override { return view(values_); }
  void read_queries(Range rows, View<float, 3> out) override { payload_.read_queries(rows, out); }
  void read_prompt_attention(Range rows, View<float, 3> out) override;
  void read_decode_attention(Index step, View<float, 2> out) override;

  [[nodiscard]] LayerWeights& weights() { return *weights_; }

 private:
  [[nodiscard]] View<const float, 3> view(const std::vector<float>& vectors) const {
    return {vectors.data(), {info_.kv_heads, info_.tokens, *info_.head_dim}};
  }
  void merge(Index kv_head, Index into, std::span<const Evict* const> evicted);
  void merge_vectors(std::vector<float>& vectors, Index kv_head, Index into,
                     std::span<const Evict* const> evicted) const;

  const SequenceInfo& info_;
  LayerPayload& payload_;
  std::vector<float> keys_;    ///< [kv_heads, T, head_dim]
  std::vector<float> values_;  ///< [kv_heads, T, head_dim]
  std::vector<float> sizes_;   ///< [kv_heads, T]
  std::unique_ptr<LayerWeights> weights_;
};

}  // namespace hae
