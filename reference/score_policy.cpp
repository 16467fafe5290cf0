#include "reference/score_policy.hpp"

#include <algorithm>

namespace hae::reference {
namespace {

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

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
      throw ConfigError("policy '" + policy_.spec() + "': sequence '" + info_.name + "', layer " +
                        std::to_string(layer) + ": sinks + recent = " +
                        std::to_string(limits.sinks + limits.recent) + " exceeds the budget of " +
                        std::to_string(budget) + " tokens; raise the budget or protect fewer");
    }
    for (Index lane = 0; lane < cache.lanes(); ++lane) {
      const Index excess = std::max<Index>(0, cache.residents(lane) - budget);
      const std::vector<Index> tokens = eligible(cache, lane, limits.sinks, limits.recent);
      for (const Scored& lowest : scores_.back().lowest(lane, tokens, excess)) {
        decision.evict.push_back({layer, lane, lowest.token, lowest.score});
      }
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

LaneSizes sizes_at_budget(Index budget, Index residents, Index steps) {
  LaneSizes sizes;
  residents = std::min(residents, budget);
  for (Index step = 0; step < steps; ++step) {
    ++residents;
    sizes.total += residents;
    sizes.peak = std::max(sizes.peak, residents);
    residents = std::min(residents, budget);
  }
  return sizes;
}

PruningOptions parse_pruning(Options& options) {
  using Rule = PruningOptions::Rule;
  using Scope = PruningOptions::Scope;
  using Broadcast = PruningOptions::Broadcast;
  PruningOptions pruning;
  pruning.rule = options.choose<Rule>("dap", {{"threshold", Rule::threshold}, {"mass", Rule::mass}});
  if (pruning.rule == Rule::threshold) {
    options.exclude({"eps"}, "dap=threshold");
    pruning.r = options.threshold("r");
    pruning.alpha = options.threshold("alpha");
  } else {
    options.exclude({"r"}, "dap=mass");
    if (!options.given("eps")) {
      options.fail("eps", "is required with dap=mass: the share of the visual attention that may be lost");
    }
    pruning.eps = options.threshold("eps");
    if (options.given("alpha")) {
      pruning.alpha = options.threshold("alpha");
    } else {
      options.resolve("alpha", "none");
    }
  }
  pruning.heads = options.choose<HeadReduction>("heads", {{"mean", HeadReduction::mean}, {"max", HeadReduction::max}});
  pruning.scope = options.choose<Scope>("scope", {{"sequence", Scope::sequence}, {"image", Scope::image}});
  if (options.text("max_evicted") != "none") {
    pruning.max_evicted = options.count("max_evicted", 0);
  }
  pruning.broadcast = options.choose<Broadcast>("broadcast", {{"all", Broadcast::all}, {"none", Broadcast::none}});
  if (pruning.broadcast == Broadcast::none) {
    options.exclude({"effect"}, "broadcast=none");
  } else {
    pruning.effect = options.choose<Effect>("effect", {{"within", Effect::within}, {"after", Effect::after}});
  }
  return pruning;
}

LaneKind parse_lane(const Options& options) {
  return options.choose<LaneKind>("lane", {{"layer", LaneKind::layer}, {"kv_head", LaneKind::kv_head}});
}

Reduction parse_head_reduction(const Options& options) {
  Reduction reduction;
  reduction.lanes = parse_lane(options);
  reduction.heads = options.choose<HeadReduction>(
      "group", {{"mean", HeadReduction::mean}, {"max", HeadReduction::max}, {"sum", HeadReduction::sum}});
  if (reduction.heads != HeadReduction::mean && reduction.lanes == LaneKind::layer) {
    options.fail("group", "other than mean needs lane=kv_head; set it, or leave group out");
  }
  return reduction;
}

ScoreOptions parse_scores(const Options& options) {
  using Over = ScoreOptions::Over;
  ScoreOptions scores;
  scores.reduction = parse_head_reduction(options);
  scores.reduction.attention = options.choose<Attention>(
      "scores", {{"observed", Attention::observed}, {"full", Attention::full}});
  scores.over = options.choose<Over>("score", {{"sum", Over::sum}, {"mean", Over::mean}});
  return scores;
}

std::optional<Index> parse_budget(const Options& options) {
  const bool has_none = options.text("budget") == "-" && !options.given("budget");
  if (options.text("budget") == "prompt" || has_none) {
    return std::nullopt;
  }
  return options.count("budget", 1);
}

}  // namespace hae::reference
