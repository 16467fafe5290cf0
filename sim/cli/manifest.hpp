#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "sim/cli/comparison.hpp"

namespace hae::cli {

/// Remembers the command line, for manifests. Called once by main.
void set_command(int argc, char** argv);
const std::string& command();

/// Version, compiler and backend, as `hae --version` prints them.
std::string version_text();

/// Everything a result can be repeated from: command, version, machine, traces and stored logs with their
/// SHA-256, backend, the options that decide what is measured, and the rules that decide ties, positions,
/// sums and NaN.
nlohmann::ordered_json manifest(const ComparisonOptions& options, const std::vector<PolicySource>& policies);

/// The options that a manifest names; threads and locks are the caller's.
/// throws  TraceError when it is not a manifest; where begins the message
ComparisonOptions options_of(const nlohmann::ordered_json& manifest, const std::string& where);

}  // namespace hae::cli
