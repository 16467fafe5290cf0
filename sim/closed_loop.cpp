#include "sim/closed_loop.hpp"

#include <algorithm>
#include <numeric>

#include "sim/row_kernels.hpp"

namespace hae {
namespace {

/// Prompt rows whose weights are formed at a time. It never changes a result.
constexpr Index kBlockRows = 96;

SequenceInfo checked(SequenceInfo info, const std::string& where) {
  check_floating_point_mode();
  check_info(info, where);
  HAE_EXPECTS(info.payload == Payload::qkv);
  return info;
}

}  // namespace

/// The payload of a layer that grows while the model runs.
class ClosedLoop::Layer final : public LayerPayload {
 public:
  Layer(const SequenceInfo& info, Index layer, NanRule nan, const std::string& where)
      : info_(info),
        keys_(at(info.kv_heads * info.tokens * *info.head_dim)),
        values_(keys_.size()),
        weights_(info, layer, info.tokens, *this, nan, where),
        meter_(info, values()) {}

  [[nodiscard]] View<const float, 3> keys() override {
    return {keys_.data(), {info_.kv_heads, info_.tokens, *info_.head_dim}};
  }
  [[nodiscard]] View<const float, 3> values() override {
    return {values_.data(), {info_.kv_heads, info_.tokens, *info_.head_dim}};
  }

  void read_queries(Range positions, View<float, 3> out) override {
    const auto first = std::ranges::lower_bound(positions_, positions.begin) - positions_.begin();
    HAE_EXPECTS(first + positions.size() <= static_cast<Index>(positions_.size()) &&
                positions_[at(first)] == positions.begin &&
                positions_[at(first + positions.size() - 1)] == positions.end - 1);
    for (Index h = 0; h < info_.query_heads; ++h) {
      std::copy_n(queries_[h][first].data(), positions.size() * *info_.head_dim, out[h].data());
    }
  }

  void read_prompt_attention(Range, View<float, 3>) override { HAE_EXPECTS(false); }
  void read_decode_attention(Index, View<float, 2>) override { HAE_EXPECTS(false); }

  /// New rows of the tokens at `positions`, ascending. The queries are viewed, until the next call.
  void take(const LayerRows& rows, const std::vector<Index>& positions) {
    positions_ = positions;
    queries_ = rows.queries;
    const Index head_dim = *info_.head_dim;
    for (Index h = 0; h < info_.kv_heads; ++h) {
      for (Index r = 0; r < static_cast<Index>(positions.size()); ++r) {
        const Index to = (h * info_.tokens + positions[at(r)]) * head_dim;
        std::copy_n(rows.keys[h][r].data(), head_dim, keys_.data() + to);
        std::copy_n(rows.values[h][r].data(), head_dim, values_.data() + to);
      }
    }
    weights_.take_keys({positions.front(), positions.back() + 1});
  }

  [[nodiscard]] LayerWeights& weights() { return weights_; }
  [[nodiscard]] RowMeter& meter() { return meter_; }

 private:
  const SequenceInfo& info_;
  std::vector<float> keys_;       ///< [kv_heads, T, head_dim]
  std::vector<float> values_;     ///< [kv_heads, T, head_dim]
  std::vector<Index> positions_;  ///< of the rows of the last call
  View<const float, 3> queries_;  ///< [query_heads, positions, head_dim]
  LayerWeights weights_;
  RowMeter meter_;
};

ClosedLoop::ClosedLoop(SequenceInfo info, std::shared_ptr<const Policy> policy, NanRule nan,
                       std::string where)
    : info_(checked(std::move(info), where)),
      where_(std::move(where)),
      nan_(nan),
      run_(std::move(policy), info_),
      steps_(at(info_.layers), 0) {
  if (run_.policy->merges()) {
    throw ConfigError(where_ + ": policy '" + run_.policy->spec() +
                      "' merges tokens, which a running model's cache does not do; compare it on recordings");
  }
  for (Index layer = 0; layer < info_.layers; ++layer) {
    const Needs needs = run_.policy->needs(info_, layer);
    if (needs.embedding_similarity || needs.unrotated_queries) {
      throw NeedsError(
          where_ + ": policy '" + run_.policy->spec() + "' needs " +
          (needs.embedding_similarity ? "the inner products of the prompt's input embeddings"
                                      : "queries before rotary embedding") +
          ", which a running model does not give here; choose a policy that does without, or replay "
          "a recording that has them");
    }
  }
}

ClosedLoop::~ClosedLoop() = default;

void ClosedLoop::refuse(const std::string& complaint) const {
  throw ContractViolation(where_ + ": " + complaint);
}

void ClosedLoop::refuse_if_finished() const {
  if (finished_) {
    refuse("the run is finished already");
  }
}

std::span<const Index> ClosedLoop::absent(Index layer) const {
  if (layer < 0 || layer > static_cast<Index>(layers_.size()) || layer >= info_.layers) {
    refuse("what is absent in layer " + std::to_string(layer) +
           " is not known before the layers before it had their prefill");
  }
  return run_.within[at(layer)];
}

void ClosedLoop::take(const LayerRows& rows, Index layer, const std::vector<Index>& positions) {
  const auto count = static_cast<Index>(positions.size());
  const auto fits = [&](const View<const float, 3>& view, Index heads) {
    return view.extent(0) == heads && view.extent(1) == count && view.extent(2) == *info_.head_dim;
  };
  if (!fits(rows.queries, info_.query_heads) || !fits(rows.keys, info_.kv_heads) ||
      !fits(rows.values, info_.kv_heads)) {
    refuse("layer " + std::to_string(layer) + " gives other rows than expected: queries [" +
           std::to_string(info_.query_heads) + ", " + std::to_string(count) + ", " +
           std::to_string(*info_.head_dim) + "], keys and values [" + std::to_string(info_.kv_heads) + ", " +
           std::to_string(count) + ", " + std::to_string(*info_.head_dim) + "]");
  }
  check_finite(rows.values, "value", layer, positions);
  if (nan_ == NanRule::error) {
    check_finite(rows.keys, "key", layer, positions);
  }
  layers_[at(layer)]->take(rows, positions);
}

void ClosedLoop::check_finite(const View<const float, 3>& vectors, const char* what, Index layer,
                              const std::vector<Index>& positions) const {
  for (Index h = 0; h < vectors.extent(0); ++h) {
    for (Index r = 0; r < vectors.extent(1); ++r) {
      if (!kernels::maximum(vectors[h][r].data(), 0, vectors.extent(2)).finite) {
        throw TraceError(where_ + ", layer " + std::to_string(layer) + ", KV head " + std::to_string(h) +
                         ", token " + std::to_string(positions[at(r)]) + ": the " + what +
                         " vector is not finite; look for an overflow in the model's arithmetic");
      }
    }
  }
}

void ClosedLoop::prefill(Index layer, const LayerRows& rows) {
  if (layer != static_cast<Index>(layers_.size()) || layer >= info_.layers) {
    refuse("prefill of layer " + std::to_string(layer) + ", expected layer " +
           std::to_string(layers_.size()) + " of " + std::to_string(info_.layers));
  }
  run_.begin_layer(layer);
  layers_.push_back(std::make_unique<Layer>(info_, layer, nan_, where_));
  std::vector<Index> positions;
  for (Index token = 0; token < info_.prompt; ++token) {
    if (run_.caches.back().is_resident(0, token)) {
      positions.push_back(token);
    }
  }
  if (positions.empty()) {
    refuse("every prompt token left within the prefill of layer " + std::to_string(layer));
  }
  layers_.back()->weights().leave_out(run_.within[at(layer)]);
  take(rows, layer, positions);
  run_.show_vectors(layer, *layers_.back());
  observe_prompt(layer, positions);
  run_.end_layer_prefill(layer);
  if (layer + 1 == info_.layers) {
    run_.end_prefill();
  }
}

void ClosedLoop::observe_prompt(Index layer, const std::vector<Index>& positions) {
  LayerWeights& weights = layers_[at(layer)]->weights();
  WeightBlock block;
  for (const Range& range : neighbours(positions, kBlockRows)) {
    weights.prompt({positions[at(range.begin)], positions[at(range.end - 1)] + 1}, block);
    std::vector<Index> all(at(block.rows()));
    std::iota(all.begin(), all.end(), Index{0});
    run_.state->observe(Rows(block, std::move(all), {run_.caches.back().keep(0)}));
  }
}

void ClosedLoop::step(Index layer, const LayerRows& row) {
  refuse_if_finished();
  if (static_cast<Index>(layers_.size()) < info_.layers || layer < 0 || layer >= info_.layers) {
    refuse("a decode step of layer " + std::to_string(layer) + " before the prefill of all " +
           std::to_string(info_.layers) + " layers");
  }
  if (steps_[at(layer)] == info_.steps()) {
    throw ConfigError(where_ + ": the sequence outgrows the " + std::to_string(info_.tokens) +
                      " tokens that were announced; announce more");
  }
  const Index step = steps_[at(layer)] + 1;
  take(row, layer, {info_.prompt + step - 1});
  Layer& state = *layers_[at(layer)];
  WeightBlock block;
  state.weights().decode({step, step + 1}, block);
  state.meter().begin();
  run_.join(layer, step);
  const LayerCache& cache = run_.caches[at(layer)];
  const Rows rows(block, {0}, cache.keep_by_lane());
  run_.store_decode_row(state.meter().measure(rows, 0), state.meter().top_now(rows, 0), layer, step);
  run_.apply(run_.decoding[at(layer)]->step(rows, cache), layer, step);
  steps_[at(layer)] = step;
}

const LayerCache& ClosedLoop::cache(Index layer) const {
  if (layer < 0 || layer >= static_cast<Index>(layers_.size())) {
    refuse("layer " + std::to_string(layer) + " has no cache before its prefill");
  }
  return run_.caches[at(layer)];
}

Index ClosedLoop::missing(Index layer) const {
  const LayerCache& of = cache(layer);
  Index count = 0;
  for (Index lane = 0; lane < of.lanes(); ++lane) {
    count += of.joined() - of.residents(lane);
  }
  return count;
}

ClosedLoop::Finished ClosedLoop::finish() {
  refuse_if_finished();
  if (static_cast<Index>(layers_.size()) < info_.layers) {
    refuse("the prefill of all layers is not over");
  }
  const Index steps = steps_.front();
  if (std::ranges::any_of(steps_, [&](Index made) { return made != steps; })) {
    refuse("layers made different numbers of decode steps");
  }
  finished_ = true;
  for (Index layer = 0; layer < info_.layers; ++layer) {
    Ledger& ledger = run_.decode[at(layer)];
    ledger.masked_rows += layers_[at(layer)]->weights().masked_rows();
    ledger.lowered_weights += layers_[at(layer)]->weights().lowered();
  }
  Finished finished{info_, run_.finish(steps)};
  finished.info.tokens = info_.prompt + steps;
  finished.info.image.resize(at(finished.info.tokens));
  finished.info.generated = std::min(info_.generated, steps + 1);
  return finished;
}

}  // namespace hae
