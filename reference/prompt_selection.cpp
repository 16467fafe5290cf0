#include "reference/prompt_selection.hpp"

#include <algorithm>

#include "reference/keep_everything.hpp"
#include "reference/selection.hpp"

namespace hae::reference {
namespace {

class SelectionRun final : public Run {
 public:
  SelectionRun(const PromptSelection& policy, const SequenceInfo& info)
      : policy_(policy),
        info_(info),
        lanes_(lane_count(info, policy.lanes())),
        limits_(at(info.layers * lanes_), Limits{.sinks = policy.sinks()}) {}

  void begin_layer(Index /*layer*/, const LayerVectors& vectors) override {
    vectors_ = vectors;
    scorer_ = policy_.scorer(info_, vectors);
  }

  void observe(const Rows& rows) override { scorer_->observe(rows); }

  Decision fit(Index layer, const LayerCache& cache) override {
    const Index budget = policy_.fitted(info_);
    const std::vector<std::vector<double>> scores = scorer_->scores();
    const std::vector<Index> kept = policy_.kept_by_lane(info_, layer, budget, scores);
    Decision decision;
    for (Index lane = 0; lane < lanes_; ++lane) {
      Limits& limits = limits_[at(layer * lanes_ + lane)];
      limits = policy_.limits_of(kept[at(lane)]);
      keep_highest(cache, layer, lane, scores[at(lane)], limits, decision);
    }
    scorer_.reset();
    return decision;
  }

  std::unique_ptr<LayerDecode> decode(Index /*layer*/) override { return std::make_unique<KeepEverything>(); }
  [[nodiscard]] Limits limits(Index layer, Index lane) const override {
    return limits_[at(layer * lanes_ + lane)];
  }

 private:
  void keep_highest(const LayerCache& cache, Index layer, Index lane, const std::vector<double>& scores,
                    const Limits& limits, Decision& decision) const {
    const Index excess = cache.residents(lane) - *limits.budget;
    if (excess <= 0) {
      return;
    }
    std::vector<Scored> candidates;
    for (const Index token : eligible(cache, lane, limits.sinks, limits.recent)) {
      if (policy_.is_candidate(info_, token)) {
        candidates.push_back({scores[at(token)], token});
      }
    }
    std::vector<Evict> evicted;
    for (const Scored& lowest : select_lowest(std::move(candidates), excess)) {
      evicted.push_back({layer, lane, lowest.token, lowest.score, std::nullopt});
    }
    std::ranges::sort(evicted, {}, &Evict::token);
    policy_.merge(vectors_, cache, lane, evicted);
    decision.evict.insert(decision.evict.end(), evicted.begin(), evicted.end());
  }

  const PromptSelection& policy_;
  const SequenceInfo& info_;
  Index lanes_;
  std::vector<Limits> limits_;  ///< [layers, lanes]
  LayerVectors vectors_;        ///< of the layer in its prefill
  std::unique_ptr<PromptScorer> scorer_;
};

}  // namespace

std::unique_ptr<Run> PromptSelection::start(const SequenceInfo& info) const {
  require_budget();
  return std::make_unique<SelectionRun>(*this, info);
}

Index PromptSelection::fitted(const SequenceInfo& info) const {
  const Index tokens = budget()->of(info.prompt);
  if (sinks_ + window_ > tokens) {
    throw ConfigError("policy '" + spec() + "': sequence '" + info.name + "', layer 0: sinks + window = " +
                      std::to_string(sinks_ + window_) + " exceeds the budget of " + std::to_string(tokens) +
                      " tokens; raise the budget or protect fewer");
  }
  return tokens;
}

std::optional<Limits> PromptSelection::limits_under(const SequenceInfo& info, Index layer,
                                                    Index budget) const {
  return sinks_ + window_ > budget ? std::nullopt : std::optional(limits_of(kept(info, layer, budget)));
}

Index PromptSelection::kept(const SequenceInfo& info, Index /*layer*/, Index budget) const {
  return std::min(budget, info.prompt);
}

std::vector<Index> PromptSelection::kept_by_lane(const SequenceInfo& info, Index layer, Index budget,
                                                 const std::vector<std::vector<double>>& scores) const {
  return std::vector<Index>(scores.size(), kept(info, layer, budget));
}

}  // namespace hae::reference
