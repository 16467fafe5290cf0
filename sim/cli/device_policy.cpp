#include "sim/cli/device_policy.hpp"

#include <algorithm>
#include <array>

#include "reference/budgeted_policy.hpp"
#include "reference/greedy.hpp"
#include "reference/policies.hpp"
#include "reference/recycle_bin.hpp"
#include "reference/shared_options.hpp"
#include "reference/snapkv_scores.hpp"
#include "sim/logged_policy.hpp"

namespace hae::cli {
namespace {

using device::Eviction;
using device::Ranking;
using reference::Amount;
using reference::Options;

/// What a policy of the table would be parsed from again: its options as resolved, less those that another
/// one makes meaningless.
Options resolved_options(const Policy& policy) {
  const std::string canonical = policy.spec();
  const std::string_view name = Options::name_of(canonical);
  const auto table = reference::policies();
  const auto info = std::ranges::find(table, name, &reference::PolicyInfo::name);
  HAE_EXPECTS(info != table.end());
  std::string spec(name);
  for (const auto& [key, value] : policy.options()) {
    const bool is_absent =
        value == "-" || (key == "alpha" && value == "none");  // else it would count as given
    if (!is_absent) {
      spec += (spec.size() == name.size() ? ":" : ",") + key + "=" + value;
    }
  }
  return {spec, info->options};
}

std::optional<device::Pruning> device_pruning(Options& options, Index sinks) {
  using reference::PruningOptions;
  const std::optional<PruningOptions> parsed = reference::parse_pruning(options);
  if (!parsed) {
    return std::nullopt;
  }
  const bool by_mass = parsed->rule == PruningOptions::Rule::mass;
  return device::Pruning{
      .rule = {.kind = by_mass ? device::PruningRule::Kind::mass : device::PruningRule::Kind::threshold,
               .r = parsed->r,
               .eps = parsed->eps,
               .alpha = parsed->alpha,
               .max_evicted = parsed->max_evicted,
               .sinks = sinks},
      .heads = parsed->heads,
      .per_image = parsed->scope == PruningOptions::Scope::image,
      .broadcast = parsed->broadcast == PruningOptions::Broadcast::all,
      .effect = parsed->effect};
}

/// What policies that add attention up have in common.
DevicePolicy by_attention(const reference::ScoreOptions& scores, const std::optional<Amount>& budget,
                          std::function<Limits(Index budget)> limits) {
  DevicePolicy policy;
  policy.run.lanes = scores.reduction.lanes;
  policy.run.ranking.by = Ranking::By::attention;
  policy.run.ranking.reduction = scores.reduction;
  policy.run.ranking.divides_by_exposures = scores.over == reference::ScoreOptions::Over::mean;
  policy.budget = [budget](Index residents) { return budget ? budget->of(residents) : residents; };
  policy.run.limits = [of = policy.budget, limits = std::move(limits)](Index residents) {
    return limits(*of(residents));
  };
  return policy;
}

/// The limits that a decode rule of the reference states.
std::function<Limits(Index)> limits_of(std::shared_ptr<const reference::DecodeRule> rule, Index sinks) {
  return [rule = std::move(rule), sinks](Index budget) { return rule->limits(sinks, budget); };
}

DevicePolicy hae(Options options) {
  const Index sinks = options.count("sinks", 0);
  const std::optional<device::Pruning> pruning = device_pruning(options, sinks);
  DevicePolicy policy;
  if (options.text("ddes") == "none") {
    policy.run.lanes = reference::parse_lane(options);
    policy.budget = [](Index) { return std::nullopt; };
    policy.run.limits = [sinks](Index) { return Limits{.sinks = sinks}; };
  } else {
    const auto mode = options.choose<reference::RecycleBin::Mode>(
        "ddes", {{"mark", reference::RecycleBin::Mode::mark}, {"batch", reference::RecycleBin::Mode::batch}});
    reference::RecycleBin bin{.mode = mode, .capacity = options.amount("bin")};
    if (options.text("recent") != "auto") {
      bin.recent = options.count("recent", 0);
    }
    policy = by_attention(reference::parse_scores(options), reference::parse_budget(options),
                          limits_of(reference::make_recycle_bin_rule(bin), sinks));
    policy.run.eviction = mode == reference::RecycleBin::Mode::mark ? Eviction::mark : Eviction::batch;
  }
  policy.run.pruning = pruning;
  return policy;
}

DevicePolicy greedy(Options options) {
  const Index sinks = options.count("sinks", 0);
  const std::optional<device::Pruning> pruning = device_pruning(options, sinks);
  DevicePolicy policy =
      by_attention(reference::parse_scores(options), reference::parse_budget(options),
                   limits_of(reference::make_greedy_rule(reference::parse_recent(options)), sinks));
  policy.run.eviction = Eviction::every_step;
  policy.run.pruning = pruning;
  return policy;
}

DevicePolicy h2o_layerwise(Options options) {
  DevicePolicy policy =
      by_attention({.reduction = reference::parse_head_reduction(options)}, reference::parse_budget(options),
                   limits_of(reference::make_greedy_rule(reference::parse_recent(options)), 0));
  policy.run.eviction = Eviction::every_step;
  return policy;
}

/// What policies with a budget of tokens, or of a share of the prompt, have in common.
DevicePolicy at_budget(const std::optional<Amount>& budget, Ranking::By by, Limits limits) {
  DevicePolicy policy;
  policy.run.ranking.by = by;
  policy.run.eviction = Eviction::every_step;
  policy.budget = [budget](Index residents) { return budget->of(residents); };
  policy.run.limits = [of = policy.budget, limits](Index residents) {
    Limits with_budget = limits;
    with_budget.budget = of(residents);
    with_budget.capacity = with_budget.budget;
    return with_budget;
  };
  return policy;
}

DevicePolicy window(Options options) {
  const Index sinks = options.count("sinks", 0);
  const std::optional<Amount> budget = options.given("recent")
                                           ? Amount::of_tokens(sinks + options.count("recent", 0))
                                           : reference::parse_budget(options);
  DevicePolicy policy = at_budget(budget, Ranking::By::age, {.sinks = sinks});
  policy.run.limits = [of = policy.budget, sinks](Index residents) {
    const std::optional<Index> total = of(residents);
    return Limits{
        .sinks = sinks, .recent = std::max<Index>(0, *total - sinks), .budget = total, .capacity = total};
  };
  return policy;
}

DevicePolicy random(Options options) {
  DevicePolicy policy = at_budget(reference::parse_budget(options), Ranking::By::draw, {});
  policy.run.lanes = reference::parse_lane(options);
  policy.run.ranking.seed = options.seed("seed");
  return policy;
}

DevicePolicy tova(Options options) {
  return at_budget(reference::parse_budget(options), Ranking::By::newest_row, {});
}

DevicePolicy snapkv(Options options) {
  const reference::SnapkvScores scores = reference::parse_snapkv_scores(options);
  DevicePolicy policy = at_budget(reference::parse_budget(options), Ranking::By::last_rows, {});
  policy.run.lanes = LaneKind::kv_head;
  policy.run.eviction = Eviction::after_prefill;
  policy.run.ranking.window = scores.window;
  policy.run.ranking.reduction.heads = HeadReduction::sum;  // of each query head on its own
  policy.run.ranking.pooling = {
      .kernel = scores.kernel, .takes_maximum = scores.pool == reference::Pool::max, .group = scores.group};
  policy.run.limits = [of = policy.budget, window = scores.window](Index residents) {
    if (window > *of(residents)) {
      return Limits{.recent = window, .budget = of(residents)};
    }
    const Index kept = std::min(*of(residents), residents);
    return Limits{.recent = window, .budget = kept, .capacity = kept, .grows = true};
  };
  return policy;
}

DevicePolicy full(Options /*options*/) {
  DevicePolicy policy;
  policy.budget = [](Index) { return std::nullopt; };
  policy.run.limits = [](Index) { return Limits{}; };
  return policy;
}

struct Entry {
  std::string_view name;
  DevicePolicy (*make)(Options);
};

constexpr std::array kTable = {
    Entry{"hae", hae},       Entry{"greedy", greedy}, Entry{"h2o/layerwise", h2o_layerwise},
    Entry{"window", window}, Entry{"random", random}, Entry{"snapkv", snapkv},
    Entry{"tova", tova},     Entry{"full", full},
};

}  // namespace

std::vector<std::string> device_policies() {
  std::vector<std::string> names;
  for (const Entry& entry : kTable) {
    names.emplace_back(entry.name);
  }
  return names;
}

DevicePolicy device_policy(const Policy& policy) {
  const std::string spec = policy.spec();
  const auto entry = std::ranges::find(kTable, Options::name_of(spec), &Entry::name);
  if (entry == kTable.end()) {
    std::string names;
    for (const Entry& known : kTable) {
      names += (names.empty() ? "" : ", ") + std::string(known.name);
    }
    throw ConfigError("policy '" + spec + "' does not run on a device; those that do are " + names +
                      "; use --backend reference");
  }
  DevicePolicy found = entry->make(resolved_options(policy));
  found.run.spec = spec;
  return found;
}

std::shared_ptr<const Policy> audited(const Policy& policy, const DevicePolicy& on_device,
                                      const SequenceInfo& info, device::DeviceRun run,
                                      const std::string& where) {
  Decision said;  // in the order in which the policy's own run would say it
  auto pruning = run.pruning.begin();
  for (Index layer = 0; layer < info.layers; ++layer) {
    if (pruning != run.pruning.end() && pruning->layer == layer) {
      std::ranges::move(
          reference::pruning_warnings(
              info, layer, {pruning->text_rows, pruning->candidates, pruning->evicted, pruning->mass}),
          std::back_inserter(said.warnings));
      ++pruning;
    }
    if (const std::optional<Index> budget = on_device.budget(run.after_pruning[at(layer)])) {
      reference::warn_above_window(info, layer, *budget, said);
    }
  }
  return logged_policy({.spec = policy.spec(),
                        .options = policy.options(),
                        .where = where,
                        .lanes = run.lanes,
                        .log = std::move(run.log),
                        .limits = std::move(run.limits),
                        .warnings = std::move(said.warnings)});
}

}  // namespace hae::cli
