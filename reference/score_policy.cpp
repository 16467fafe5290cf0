#include "reference/score_policy.hpp"

#include <algorithm>

#include "reference/keep_everything.hpp"

namespace hae::reference {
namespace {

class ScoreRun final : public Run {
 public:
  ScoreRun(const ScorePolicy& policy, const SequenceInfo& info)
      : policy_(policy), config_(policy.config()), info_(info), limits_(at(info.layers)) {
    for (Limits& limits : limits_) {
      limits.sinks = config_.sinks;
    }
  }

  void observe(const Rows& rows) override {
    enter(rows.layer());
    if (pruning_) {
      pruning_->observe(rows);
    }
    if (config_.rule) {
      scores_.back().observe(rows);
    }
  }

  Decision prune(Index layer, const LayerCache& /*cache*/) override {
    enter(layer);
    return pruning_ ? pruning_->decide(layer) : Decision{};
  }

  Decision fit(Index layer, const LayerCache& cache) override {
    Decision decision;
    if (!config_.rule) {
      return decision;
    }
    const Index budget = config_.budget.value_or(cache.residents(0));
    limits_[at(layer)] = config_.rule->limits(config_.sinks, budget);
    const Limits& limits = limits_[at(layer)];
    if (limits.sinks + limits.recent > budget) {
      throw ConfigError(
          "policy '" + policy_.spec() + "': sequence '" + info_.name + "', layer " + std::to_string(layer) +
          ": sinks + recent = " + std::to_string(limits.sinks + limits.recent) + " exceeds the budget of " +
          std::to_string(budget) + " tokens; raise the budget or protect fewer");
    }
    const Index window = info_.masks[at(layer)].window;
    if (window > 0 && budget > window) {
      decision.warnings.push_back("layer " + std::to_string(layer) + ": the budget of " +
                                  std::to_string(budget) + " tokens exceeds the layer's window of " +
                                  std::to_string(window) + "; what is older receives no attention");
    }
    for (Index lane = 0; lane < cache.lanes(); ++lane) {
      scores_.back().evict_lowest(cache, layer, lane, limits, cache.residents(lane) - budget, decision);
    }
    return decision;
  }

  std::unique_ptr<LayerDecode> decode(Index layer) override {
    if (!config_.rule) {
      return std::make_unique<KeepEverything>();
    }
    return config_.rule->begin(std::move(scores_[at(layer)]), limits_[at(layer)]);
  }

  [[nodiscard]] Limits limits(Index layer) const override { return limits_[at(layer)]; }

 private:
  /// The first call for a layer starts its scores, and its pruning where the layer decides.
  void enter(Index layer) {
    if (layer == layer_) {
      return;
    }
    layer_ = layer;
    scores_.emplace_back(info_, config_.scores);
    pruning_.reset();
    if (config_.pruning && DualAttentionPruning::decides(*config_.pruning, layer)) {
      pruning_.emplace(info_, *config_.pruning, config_.sinks);
    }
  }

  const ScorePolicy& policy_;
  const ScorePolicy::Config& config_;
  const SequenceInfo& info_;
  Index layer_ = -1;
  std::optional<DualAttentionPruning> pruning_;  ///< of the layer in its prefill
  std::vector<CumulativeScores> scores_;         ///< [layers begun]
  std::vector<Limits> limits_;                   ///< [layers]
};

}  // namespace

ScorePolicy::ScorePolicy(Options options, Config config, Rebuild rebuild)
    : options_(std::move(options)), config_(std::move(config)), rebuild_(rebuild) {}

Needs ScorePolicy::needs(const SequenceInfo& /*info*/, Index layer) const {
  if (config_.rule) {
    return {PromptRows::all};
  }
  const bool decides = config_.pruning && DualAttentionPruning::decides(*config_.pruning, layer);
  return {decides ? PromptRows::text : PromptRows::none};
}

std::unique_ptr<Run> ScorePolicy::begin(const SequenceInfo& info) const {
  if (config_.budget_is_required && !config_.budget) {
    options_.fail("budget", "is required; give a count, or match it to the first policy's with --match");
  }
  return std::make_unique<ScoreRun>(*this, info);
}

std::shared_ptr<const Policy> ScorePolicy::with_budget(Index budget) const {
  HAE_EXPECTS(budget_is_open());
  Options options = options_;
  options.resolve("budget", std::to_string(budget));
  return rebuild_(std::move(options));
}

std::optional<LaneSizes> ScorePolicy::sizes(Index budget, Index residents, Index steps) const {
  const std::shared_ptr<const Policy> policy = with_budget(budget);
  const Config& config = static_cast<const ScorePolicy&>(*policy).config_;
  const Limits limits = config.rule->limits(config.sinks, budget);
  if (limits.sinks + limits.recent > budget) {
    return std::nullopt;
  }
  return config.rule->sizes(limits, std::min(residents, budget), steps);
}

}  // namespace hae::reference
