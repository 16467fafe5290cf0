#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sim/weights.hpp"

namespace hae::cli {

/// Remembers the command line, for manifests. Called once by main.
void set_command(int argc, char** argv);
const std::string& command();

/// Version, compiler and backend, as `hae --version` prints them.
std::string version_text();

/// Everything a result can be repeated from: command, version, machine, traces with their SHA-256, backend
/// and the rules that decide ties, positions, sums and NaN.
nlohmann::ordered_json manifest(const std::vector<std::string>& traces, NanRule nan);

}  // namespace hae::cli
