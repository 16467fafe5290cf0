#pragma once

#include <map>
#include <string>
#include <string_view>

#include "reference/options.hpp"
#include "sim/policy.hpp"

namespace hae::cli {

/// Values of options by key.
using Settings = std::map<std::string, std::string>;

/// A policy's options as resolved, defaults and a matched budget included, less those that another one makes
/// meaningless.
Settings settings_of(const Policy& policy);

/// A policy of the table given those of the settings that it knows.
///
/// throws  ConfigError as reference::Options does
reference::Options options_with(std::string_view name, const Settings& settings);

}  // namespace hae::cli
