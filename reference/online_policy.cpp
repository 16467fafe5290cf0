#include "reference/online_policy.hpp"

#include <algorithm>

#include "reference/selection.hpp"

namespace hae::reference {
namespace {

/// Brings the lanes of a layer down to their budget.
Decision evict_excess(const OnlineScores& scores, const LayerCache& cache, Index layer,
                      const Limits& limits) {
  Decision decision;
  for (Index lane = 0; lane < cache.lanes(); ++lane) {
    const Index excess = cache.residents(lane) - *limits.budget;
    if (excess <= 0) {
      continue;
    }
    std::vector<Scored> scored;
    for (const Index token : eligible(cache, lane, limits.sinks, limits.recent)) {
      scored.push_back({scores.score(lane, token), token});
    }
    for (const Scored& lowest : select_lowest(std::move(scored), excess)) {
      decision.evict.push_back({layer, lane, lowest.token, lowest.score});
    }
  }
  return decision;
}

class OnlineDecode final : public LayerDecode {
 public:
  OnlineDecode(std::unique_ptr<OnlineScores> scores, const Limits& limits)
      : scores_(std::move(scores)), limits_(limits) {}

  Decision step(const Rows& row, const LayerCache& cache) override {
    scores_->step(row, cache);
    return evict_excess(*scores_, cache, row.layer(), limits_);
  }

 private:
  std::unique_ptr<OnlineScores> scores_;
  Limits limits_;
};

class OnlineRun final : public Run {
 public:
  OnlineRun(const OnlinePolicy& policy, const SequenceInfo& info) : policy_(policy), info_(info) {
    const Index budget = policy.fitted(info);
    const std::optional<Limits> limits = policy.limits(budget);
    if (!limits) {
      throw ConfigError("policy '" + policy.spec() + "': sequence '" + info.name +
                        "', layer 0: sinks + recent exceed the budget of " + std::to_string(budget) +
                        " tokens; raise the budget or protect fewer");
    }
    limits_ = *limits;
  }

  void begin_layer(Index layer, const LayerVectors& /*vectors*/) override {
    scores_.push_back(policy_.config().scores(info_, layer));
  }

  void observe(const Rows& rows) override { scores_.back()->prefill(rows); }

  Decision fit(Index layer, const LayerCache& cache) override {
    return evict_excess(*scores_.back(), cache, layer, limits(layer, 0));
  }

  Decision balance(const std::vector<LayerCache>& /*caches*/) override {
    is_fitted_ = true;
    return {};
  }

  std::unique_ptr<LayerDecode> decode(Index layer) override {
    return std::make_unique<OnlineDecode>(std::move(scores_[at(layer)]), limits(layer, 0));
  }

  [[nodiscard]] Limits limits(Index /*layer*/, Index /*lane*/) const override {
    Limits limits = limits_;
    if (!is_fitted_) {
      limits.recent = std::max<Index>(0, limits.recent - policy_.config().less_recent_in_fit);
    }
    return limits;
  }

 private:
  const OnlinePolicy& policy_;
  const SequenceInfo& info_;
  Limits limits_;                                      ///< while decoding
  std::vector<std::unique_ptr<OnlineScores>> scores_;  ///< [layers begun]
  bool is_fitted_ = false;
};

}  // namespace

OnlinePolicy::OnlinePolicy(Options options, Config config, Rebuild rebuild)
    : BudgetedPolicy(std::move(options), rebuild), config_(std::move(config)) {}

std::unique_ptr<Run> OnlinePolicy::start(const SequenceInfo& info) const {
  require_budget();
  return std::make_unique<OnlineRun>(*this, info);
}

std::optional<Limits> OnlinePolicy::limits(Index budget) const {
  const Limits limits = {
      .sinks = config_.sinks, .recent = config_.recent(budget), .budget = budget, .capacity = budget};
  return limits.sinks + limits.recent > budget ? std::nullopt : std::optional(limits);
}

}  // namespace hae::reference
