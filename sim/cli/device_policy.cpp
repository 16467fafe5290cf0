#include "sim/cli/device_policy.hpp"

#include <algorithm>
#include <array>

#include "reference/greedy.hpp"
#include "reference/recycle_bin.hpp"
#include "reference/shared_options.hpp"
#include "reference/sliding_window.hpp"
#include "reference/snapkv_scores.hpp"
#include "sim/cli/policy_settings.hpp"
#include "sim/logged_policy.hpp"

namespace hae::cli {
namespace {

using device::Eviction;
using device::PolicyRun;
using device::Ranking;
using reference::Amount;
using reference::Options;

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
PolicyRun by_attention(const reference::ScoreOptions& scores, const std::optional<Amount>& budget,
                       std::function<Limits(Index budget)> limits) {
  PolicyRun policy;
  policy.lanes = scores.reduction.lanes;
  policy.ranking.by = Ranking::By::attention;
  policy.ranking.reduction = scores.reduction;
  policy.ranking.divides_by_exposures = scores.over == reference::ScoreOptions::Over::mean;
  policy.limits = [budget, limits = std::move(limits)](Index residents) {
    return limits(budget ? budget->of(residents) : residents);
  };
  return policy;
}

/// The limits that a decode rule of the reference states.
std::function<Limits(Index)> limits_of(std::shared_ptr<const reference::DecodeRule> rule, Index sinks) {
  return [rule = std::move(rule), sinks](Index budget) { return rule->limits(sinks, budget); };
}

PolicyRun hae(Options options) {
  const Index sinks = options.count("sinks", 0);
  const std::optional<device::Pruning> pruning = device_pruning(options, sinks);
  PolicyRun policy;
  if (options.text("ddes") == "none") {
    policy.lanes = reference::parse_lane(options);
    policy.limits = [sinks](Index) { return Limits{.sinks = sinks}; };
  } else {
    const auto mode = options.choose<reference::RecycleBin::Mode>(
        "ddes", {{"mark", reference::RecycleBin::Mode::mark}, {"batch", reference::RecycleBin::Mode::batch}});
    reference::RecycleBin bin{.mode = mode, .capacity = options.amount("bin")};
    if (options.text("recent") != "auto") {
      bin.recent = options.count("recent", 0);
    }
    policy = by_attention(reference::parse_scores(options), reference::parse_budget(options),
                          limits_of(reference::make_recycle_bin_rule(bin), sinks));
    policy.eviction = mode == reference::RecycleBin::Mode::mark ? Eviction::mark : Eviction::batch;
  }
  policy.pruning = pruning;
  return policy;
}

PolicyRun greedy(Options options) {
  const Index sinks = options.count("sinks", 0);
  const std::optional<device::Pruning> pruning = device_pruning(options, sinks);
  PolicyRun policy =
      by_attention(reference::parse_scores(options), reference::parse_budget(options),
                   limits_of(reference::make_greedy_rule(reference::parse_recent(options)), sinks));
  policy.eviction = Eviction::every_step;
  policy.pruning = pruning;
  return policy;
}

PolicyRun h2o_layerwise(Options options) {
  PolicyRun policy =
      by_attention({.reduction = reference::parse_head_reduction(options)}, reference::parse_budget(options),
                   limits_of(reference::make_greedy_rule(reference::parse_recent(options)), 0));
  policy.eviction = Eviction::every_step;
  return policy;
}

/// What policies with a budget of tokens, or of a share of the prompt, have in common.
PolicyRun at_budget(const std::optional<Amount>& budget, Ranking::By by) {
  PolicyRun policy;
  policy.ranking.by = by;
  policy.eviction = Eviction::every_step;
  policy.limits = [budget](Index residents) {
    return Limits{.budget = budget->of(residents), .capacity = budget->of(residents)};
  };
  return policy;
}

PolicyRun window(Options options) {
  const Index sinks = options.count("sinks", 0);
  const std::optional<Amount> budget = options.given("recent")
                                           ? Amount::of_tokens(sinks + options.count("recent", 0))
                                           : reference::parse_budget(options);
  PolicyRun policy = at_budget(budget, Ranking::By::age);
  policy.limits = [budget, sinks](Index residents) {
    const Index total = budget->of(residents);
    return Limits{
        .sinks = sinks, .recent = std::max<Index>(0, total - sinks), .budget = total, .capacity = total};
  };
  return policy;
}

PolicyRun random(Options options) {
  PolicyRun policy = at_budget(reference::parse_budget(options), Ranking::By::draw);
  policy.lanes = reference::parse_lane(options);
  policy.ranking.seed = options.seed("seed");
  return policy;
}

PolicyRun tova(Options options) {
  return at_budget(reference::parse_budget(options), Ranking::By::newest_row);
}

PolicyRun snapkv(Options options) {
  const reference::SnapkvScores scores = reference::parse_snapkv_scores(options);
  const std::optional<Amount> budget = reference::parse_budget(options);
  PolicyRun policy = at_budget(budget, Ranking::By::last_rows);
  policy.lanes = LaneKind::kv_head;
  policy.eviction = Eviction::after_prefill;
  policy.ranking.window = scores.window;
  policy.ranking.reduction.heads = HeadReduction::sum;  // of each query head on its own
  policy.ranking.pooling = {
      .kernel = scores.kernel, .takes_maximum = scores.pool == reference::Pool::max, .group = scores.group};
  policy.limits = [budget, window = scores.window](Index residents) {
    if (window > budget->of(residents)) {
      return Limits{.recent = window, .budget = budget->of(residents)};
    }
    const Index kept = std::min(budget->of(residents), residents);
    return Limits{.recent = window, .budget = kept, .capacity = kept, .grows = true};
  };
  return policy;
}

PolicyRun full(Options /*options*/) {
  PolicyRun policy;
  policy.limits = [](Index) { return Limits{}; };
  return policy;
}

struct Entry {
  std::string_view name;
  PolicyRun (*make)(Options);
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

PolicyRun device_policy(const Policy& policy) {
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
  PolicyRun found = entry->make(options_with(entry->name, settings_of(policy)));
  found.capped = [](const Limits& promised, Index window) {
    return reference::capped_at_window(promised, *promised.budget, 1, window);
  };
  found.spec = spec;
  return found;
}

std::shared_ptr<const Policy> audited(const Policy& policy, const SequenceInfo& info, device::DeviceRun run,
                                      const std::string& where) {
  std::vector<std::string> said;  // in the order in which the policy's own run would say it
  auto pruning = run.pruning.begin();
  const Index lanes = lane_count(info, run.lanes);
  for (Index layer = 0; layer < info.layers; ++layer) {
    if (pruning != run.pruning.end() && pruning->layer == layer) {
      std::ranges::move(
          reference::pruning_warnings(
              info, layer, {pruning->text_rows, pruning->candidates, pruning->evicted, pruning->mass}),
          std::back_inserter(said));
      ++pruning;
    }
    if (run.is_capped[at(layer)]) {
      said.push_back(reference::capping_warning(info, layer, *run.limits[at(layer * lanes)].budget));
    }
  }
  return logged_policy({.spec = policy.spec(),
                        .options = policy.options(),
                        .where = where,
                        .lanes = run.lanes,
                        .log = std::move(run.log),
                        .limits = std::move(run.limits),
                        .warnings = std::move(said)});
}

}  // namespace hae::cli
