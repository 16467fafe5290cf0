#include "reference/shared_options.hpp"

#include <algorithm>

namespace hae::reference {

std::optional<PruningOptions> parse_pruning(Options& options) {
  if (options.text("dap") == "none") {
    options.exclude({"r", "alpha", "eps", "heads", "scope", "max_evicted", "broadcast", "effect"},
                    "dap=none");
    return std::nullopt;
  }
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
  pruning.heads =
      options.choose<HeadReduction>("heads", {{"mean", HeadReduction::mean}, {"max", HeadReduction::max}});
  pruning.scope = options.choose<Scope>("scope", {{"sequence", Scope::sequence}, {"image", Scope::image}});
  if (options.text("max_evicted") != "none") {
    pruning.max_evicted = options.count("max_evicted", 0);
  }
  pruning.broadcast =
      options.choose<Broadcast>("broadcast", {{"all", Broadcast::all}, {"none", Broadcast::none}});
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

HeadReduction parse_group(const Options& options) {
  return options.choose<HeadReduction>(
      "group", {{"mean", HeadReduction::mean}, {"max", HeadReduction::max}, {"sum", HeadReduction::sum}});
}

Reduction parse_head_reduction(const Options& options) {
  Reduction reduction;
  reduction.lanes = parse_lane(options);
  reduction.heads = parse_group(options);
  if (reduction.heads != HeadReduction::mean && reduction.lanes == LaneKind::layer) {
    options.fail("group", "other than mean needs lane=kv_head; set it, or leave group out");
  }
  return reduction;
}

ScoreOptions parse_scores(const Options& options) {
  using Over = ScoreOptions::Over;
  ScoreOptions scores;
  scores.reduction = parse_head_reduction(options);
  scores.reduction.attention =
      options.choose<Attention>("scores", {{"observed", Attention::observed}, {"full", Attention::full}});
  scores.over = options.choose<Over>("score", {{"sum", Over::sum}, {"mean", Over::mean}});
  return scores;
}

RecentOfBudget parse_recent(const Options& options) {
  if (options.text("recent") == "auto" && options.default_of("recent") == "auto") {
    return [](Index budget) { return std::max<Index>(1, budget / 2); };
  }
  return [recent = options.count("recent", 0)](Index) { return recent; };
}

std::optional<Amount> parse_budget(const Options& options) {
  if (!options.has("budget")) {
    return std::nullopt;
  }
  const std::string& text = options.text("budget");
  const bool may_be_prompt = options.default_of("budget") == "prompt";
  const bool is_none = options.given("budget") ? may_be_prompt && text == "prompt"
                                               : text == options.default_of("budget") || text == "-";
  if (is_none) {
    return std::nullopt;
  }
  const Amount budget = options.amount("budget");
  if (budget.exceeds_whole()) {
    options.fail("budget");
  }
  return budget;
}

}  // namespace hae::reference
