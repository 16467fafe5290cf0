#include "sim/cli/policy_settings.hpp"

#include <algorithm>

#include "reference/policies.hpp"

namespace hae::cli {

Settings settings_of(const Policy& policy) {
  Settings settings;
  for (const auto& [key, value] : policy.options()) {
    const bool is_absent =
        value == "-" || (key == "alpha" && value == "none");  // else it would count as given
    if (!is_absent) {
      settings.emplace(key, value);
    }
  }
  return settings;
}

reference::Options options_with(std::string_view name, const Settings& settings) {
  const auto table = reference::policies();
  const auto info = std::ranges::find(table, name, &reference::PolicyInfo::name);
  HAE_EXPECTS(info != table.end());
  std::string spec(name);
  for (const reference::OptionInfo& option : info->options) {
    const auto found = settings.find(std::string(option.key));
    if (found != settings.end()) {
      spec += (spec.size() == name.size() ? ":" : ",") + found->first + "=" + found->second;
    }
  }
  return {spec, info->options};
}

}  // namespace hae::cli
