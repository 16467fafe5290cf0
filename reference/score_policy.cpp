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

  void begin_layer(Index layer, const LayerVectors& /*vectors*/) override {
    scores_.emplace_back(info_, config_.scores);
    pruning_.reset();
    if (config_.pruning && DualAttentionPruning::decides(*config_.pruning, layer)) {
      pruning_.emplace(info_, *config_.pruning, config_.sinks);
    }
  }

  void observe(const Rows& rows) override {
    if (pruning_) {
      pruning_->observe(rows);
    }
    if (config_.rule) {
      scores_.back().observe(rows);
    }
  }

  Decision prune(Index layer, const LayerCache& /*cache*/) override {
    return pruning_ ? pruning_->decide(layer) : Decision{};
  }

  Decision fit(Index layer, const LayerCache& cache) override {
    Decision decision;
    if (!config_.rule) {
      return decision;
    }
    const Index budget = policy_.fitted(cache.residents(0));
    limits_[at(layer)] = config_.rule->limits(config_.sinks, budget);
    const Limits& limits = limits_[at(layer)];
    if (limits.sinks + limits.recent > budget) {
      throw ConfigError(
          "policy '" + policy_.spec() + "': sequence '" + info_.name + "', layer " + std::to_string(layer) +
          ": sinks + recent = " + std::to_string(limits.sinks + limits.recent) + " exceeds the budget of " +
          std::to_string(budget) + " tokens; raise the budget or protect fewer");
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

  [[nodiscard]] Limits limits(Index layer, Index /*lane*/) const override { return limits_[at(layer)]; }

 private:
  const ScorePolicy& policy_;
  const ScorePolicy::Config& config_;
  const SequenceInfo& info_;
  std::optional<DualAttentionPruning> pruning_;  ///< of the layer in its prefill
  std::vector<CumulativeScores> scores_;         ///< [layers begun]
  std::vector<Limits> limits_;                   ///< [layers]
};

}  // namespace

ScorePolicy::ScorePolicy(Options options, Config config, Rebuild rebuild)
    : BudgetedPolicy(std::move(options), rebuild), config_(std::move(config)) {}

Needs ScorePolicy::needs(const SequenceInfo& /*info*/, Index layer) const {
  if (config_.rule) {
    return {PromptRows::all};
  }
  const bool decides = config_.pruning && DualAttentionPruning::decides(*config_.pruning, layer);
  return {decides ? PromptRows::text : PromptRows::none};
}

std::unique_ptr<Run> ScorePolicy::start(const SequenceInfo& info) const {
  if (config_.budget_is_required) {
    require_budget();
  }
  return std::make_unique<ScoreRun>(*this, info);
}

std::optional<Limits> ScorePolicy::limits_under(const SequenceInfo& /*info*/, Index /*layer*/,
                                                Index budget) const {
  const Limits limits = config_.rule->limits(config_.sinks, budget);
  return limits.sinks + limits.recent > budget ? std::nullopt : std::optional(limits);
}

LaneSizes ScorePolicy::sizes_under(const Limits& limits, Index residents, Index steps) const {
  return config_.rule->sizes(limits, std::min(residents, *limits.budget), steps);
}

}  // namespace hae::reference
