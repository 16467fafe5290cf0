#include "sim/cli/companions.hpp"

#include <string>

#include "reference/policies.hpp"
#include "reference/shared_options.hpp"
#include "sim/cli/policy_settings.hpp"

namespace hae::cli {
namespace {

using reference::PruningOptions;

/// The value of an option; empty where the policy has no such option, or it has no meaning.
std::string setting(const Settings& settings, const std::string& key) {
  const auto found = settings.find(key);
  return found == settings.end() ? "" : found->second;
}

std::shared_ptr<const Policy> policy_with(std::string_view name, const Settings& settings) {
  return reference::make_policy(options_with(name, settings).canonical());
}

}  // namespace

bool Pruning::is_mass_alone() const {
  return is_by_mass() && options.scope == PruningOptions::Scope::sequence && !options.max_evicted &&
         !options.alpha;
}

analysis::PruningView Pruning::view() const {
  return {options.heads, options.broadcast == PruningOptions::Broadcast::none};
}

std::optional<Pruning> pruning_of(const Policy& policy) {
  Settings settings = settings_of(policy);
  const std::string rule = setting(settings, "dap");
  if (rule.empty() || rule == "none") {
    return std::nullopt;
  }
  settings["ddes"] = "none";
  for (const char* of_decoding : {"budget", "bin", "recent", "lane", "group", "score", "scores"}) {
    settings.erase(of_decoding);
  }
  reference::Options options = options_with("hae", settings);
  const Index sinks = options.count("sinks", 0);
  return Pruning{*reference::parse_pruning(options), sinks, policy_with("hae", settings)};
}

std::shared_ptr<const Policy> BinAgainstGreedy::greedy_with(Index budget) const {
  Settings settings = settings_of(*greedy);
  settings["budget"] = std::to_string(budget);
  return policy_with("greedy", settings);
}

std::optional<BinAgainstGreedy> bin_against_greedy(const Policy& policy) {
  Settings settings = settings_of(policy);
  if (setting(settings, "ddes") != "mark") {
    return std::nullopt;
  }
  const bool is_full = setting(settings, "scores") == "full";
  BinAgainstGreedy pair;
  pair.sums = setting(settings, "score") == "sum";
  if (setting(settings, "recent") == "auto") {
    settings["recent"] = "1";  // what it is with a bin that marks
  }
  pair.own_greedy = is_full ? nullptr : policy_with("greedy", settings);
  settings["scores"] = "full";
  pair.bin = policy_with("hae", settings);
  pair.greedy = policy_with("greedy", settings);
  return pair;
}

}  // namespace hae::cli
