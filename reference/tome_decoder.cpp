#include <algorithm>
#include <map>

#include "reference/keep_everything.hpp"
#include "reference/policies.hpp"
#include "reference/selection.hpp"
#include "reference/shared_options.hpp"
#include "reference/similar_keys.hpp"

namespace hae::reference {
namespace {

/// Bipartite soft matching of tokens by their keys, which are the means over the KV heads: alternately A and
/// B, each of A with the most similar of B; the most similar pairs merge by a size-weighted mean. A round
/// merges at most all of A, so there may be several.
class Matching {
 public:
  /// keys  [kv_heads, T, head_dim]
  Matching(const View<const float, 3>& keys, std::vector<Index> tokens) : tokens_(std::move(tokens)) {
    const Index head_dim = keys.extent(2);
    means_.resize(at(keys.extent(1) * head_dim));
    mean_ = {means_.data(), {keys.extent(1), head_dim}};
    for (const Index token : tokens_) {
      members_[token] = {token};
      for (Index i = 0; i < head_dim; ++i) {
        double sum = 0.0;
        for (Index h = 0; h < keys.extent(0); ++h) {
          sum += static_cast<double>(keys[h][token][i]);
        }
        mean_[token][i] = static_cast<float>(sum / static_cast<double>(keys.extent(0)));
      }
    }
  }

  void merge_down_to(Index count) {
    while (std::ssize(tokens_) > count) {
      merge_round(std::ssize(tokens_) - count);
    }
  }

  /// Tokens that stay, with all that went into them, themselves first.
  [[nodiscard]] const std::map<Index, std::vector<Index>>& members() const { return members_; }

 private:
  void merge_round(Index most) {
    std::vector<Index> from;
    std::vector<Index> into;
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      (i % 2 == 0 ? from : into).push_back(tokens_[i]);
    }
    const std::vector<Neighbour> best = most_similar(mean_, from, into);
    std::vector<Scored> pairs;
    for (std::size_t i = 0; i < from.size(); ++i) {
      pairs.push_back({-best[i].cosine, static_cast<Index>(i)});
    }
    // The most similar pairs; of equal ones the newer.
    std::ranges::sort(pairs, [](const Scored& a, const Scored& b) {
      return a.score != b.score ? a.score < b.score : a.token > b.token;
    });
    pairs.resize(at(std::min(most, std::ssize(pairs))));
    std::ranges::sort(pairs, {}, &Scored::token);
    for (const Scored& pair : pairs) {
      merge(from[at(pair.token)], best[at(pair.token)].token);
    }
  }

  void merge(Index token, Index into) {
    std::vector<Index>& gone = members_[token];
    std::vector<Index>& kept = members_[into];
    const auto size = [](const std::vector<Index>& members) { return static_cast<double>(members.size()); };
    const double all = size(gone) + size(kept);
    for (Index i = 0; i < mean_.extent(1); ++i) {
      mean_[into][i] = static_cast<float>((size(gone) * static_cast<double>(mean_[token][i]) +
                                           size(kept) * static_cast<double>(mean_[into][i])) /
                                          all);
    }
    kept.insert(kept.end(), gone.begin(), gone.end());
    members_.erase(token);
    std::erase(tokens_, token);
  }

  std::vector<Index> tokens_;  ///< that are left, ascending
  std::vector<float> means_;
  View<float, 2> mean_;  ///< [T, head_dim]
  std::map<Index, std::vector<Index>> members_;
};

class TomeRun final : public Run {
 public:
  TomeRun(const SequenceInfo& info, const Amount& keep) : info_(info), keep_(keep) {}

  void begin_layer(Index layer, const LayerVectors& vectors) override {
    if (layer == 0) {
      keys_ = vectors.keys;
    }
  }

  Decision prune(Index layer, const LayerCache& /*cache*/) override {
    std::vector<Index> visual;
    for (Index token = 0; token < info_.prompt; ++token) {
      if (info_.is_visual(token)) {
        visual.push_back(token);
      }
    }
    Decision decision;
    if (layer > 0 || visual.empty()) {
      return decision;
    }
    const Index kept = keep_.of(std::ssize(visual));
    Matching matching(keys_, std::move(visual));
    matching.merge_down_to(kept);
    for (const auto& [into, members] : matching.members()) {
      const double size = static_cast<double>(members.size());
      for (const Index token : members) {
        for (Index l = 0; token != into && l < info_.layers; ++l) {
          decision.evict.push_back(
              {l, Evict::kEveryLane, token, std::nullopt, Merge{into, 1.0 / size, 1.0 / size, size}});
        }
      }
    }
    return decision;
  }

  std::unique_ptr<LayerDecode> decode(Index /*layer*/) override { return std::make_unique<KeepEverything>(); }
  [[nodiscard]] Limits limits(Index /*layer*/, Index /*lane*/) const override { return {}; }

 private:
  const SequenceInfo& info_;
  Amount keep_;
  View<const float, 3> keys_;  ///< of layer 0, in its prefill
};

class TomeDecoder final : public Policy {
 public:
  explicit TomeDecoder(Options options) : options_(std::move(options)), keep_(options_.amount("keep")) {
    if (keep_.exceeds_whole()) {
      options_.fail("keep");
    }
  }

  [[nodiscard]] std::string spec() const override { return options_.canonical(); }
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> options() const override {
    return options_.all();
  }
  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override {
    return {.keys = true, .values = true};
  }
  [[nodiscard]] bool merges() const override { return true; }
  [[nodiscard]] std::unique_ptr<Run> begin(const SequenceInfo& info) const override {
    return std::make_unique<TomeRun>(info, keep_);
  }

 private:
  Options options_;
  Amount keep_;
};

constexpr std::array kOptions = {OptionInfo{"keep", "-", "a count of 1 or more, or a share (0.15 or 15%)",
                                            "visual prompt tokens that are left; required"}};

std::shared_ptr<const Policy> make(Options options) {
  if (!options.given("keep")) {
    options.fail("keep", "is required; give a count or a share of the visual tokens");
  }
  return std::make_shared<TomeDecoder>(std::move(options));
}

}  // namespace

const PolicyInfo kTomeDecoder = {
    "tome/decoder",
    "merges visual tokens with similar keys, once, after the first layer",
    "ToMe, arXiv 2210.09461",
    "An analogue. ToMe merges tokens inside the vision encoder, which changes the model's input; a recording "
    "of the decoder can only show the same matching there: after layer 0, by the cosine of its keys (means "
    "over KV heads), alternate tokens match, and the best pairs merge in all layers, layer 0's cache and the "
    "others within their prefill, by a size-weighted mean; ln size is added to a merged key's logit. "
    "Measured by its output errors alone. Decoding evicts nothing. Needs keys and values, no attention.",
    kOptions,
    make};

}  // namespace hae::reference
