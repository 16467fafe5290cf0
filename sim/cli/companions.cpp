#include "sim/cli/companions.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "reference/policies.hpp"

namespace hae::cli {
namespace {

/// Options by name; `-` where they have no meaning.
using Settings = std::map<std::string, std::string>;

Settings settings_of(const Policy& policy) {
  const auto options = policy.options();
  Settings settings(options.begin(), options.end());
  if (const auto alpha = settings.find("alpha"); alpha != settings.end() && alpha->second == "none") {
    alpha->second = "-";  // what dap=mass has instead of a default
  }
  return settings;
}

std::string setting(const Settings& settings, const std::string& key) {
  const auto found = settings.find(key);
  return found == settings.end() ? "-" : found->second;
}

double number(const Settings& settings, const std::string& key) {
  const std::string text = setting(settings, key);
  return text == "-" ? 0.0 : std::stod(text);
}

/// A policy of the table with those of the settings that it knows.
///
/// without  keys that are left at their defaults
std::shared_ptr<const Policy> policy_with(const std::string& name, const Settings& settings,
                                          const std::set<std::string>& without = {}) {
  const auto info = std::ranges::find(reference::policies(), name, &reference::PolicyInfo::name);
  std::string spec = name;
  for (const reference::OptionInfo& option : info->options) {
    const std::string value = setting(settings, std::string(option.key));
    if (value != "-" && !without.contains(std::string(option.key))) {
      spec += (spec == name ? ":" : ",") + std::string(option.key) + "=" + value;
    }
  }
  return reference::make_policy(spec);
}

}  // namespace

std::optional<Pruning> pruning_of(const Policy& policy) {
  Settings settings = settings_of(policy);
  const std::string rule = setting(settings, "dap");
  if (rule == "-" || rule == "none") {
    return std::nullopt;
  }
  settings["ddes"] = "none";
  const bool is_mass = rule == "mass";
  const bool is_plain = setting(settings, "scope") == "sequence" &&
                        setting(settings, "max_evicted") == "none" && setting(settings, "alpha") == "-";
  return Pruning{.rule = is_mass ? Pruning::Rule::mass : Pruning::Rule::threshold,
                 .thresholds = {number(settings, "r"), number(settings, "alpha")},
                 .eps = number(settings, "eps"),
                 .view = {setting(settings, "heads") == "max" ? HeadReduction::max : HeadReduction::mean,
                          setting(settings, "broadcast") == "none"},
                 .sinks = static_cast<Index>(number(settings, "sinks")),
                 .mass_alone = is_mass && is_plain,
                 .policy = policy_with("hae", settings,
                                       {"budget", "bin", "recent", "lane", "group", "score", "scores"})};
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
