#pragma once

#include <filesystem>

#include "sim/cli/result_json.hpp"

namespace hae::cli {

/// The most bytes a result file may have.
inline constexpr Index kMostResultBytes = Index{1} << 30;

/// The result file that a path names: itself, or the one in a folder that `--out` wrote.
std::filesystem::path result_path(const std::filesystem::path& named);

/// A result that `compare --json` wrote, or the one in a folder that `--out` wrote.
/// throws  TraceError when it cannot be read or is none
Json read_result(const std::filesystem::path& path);

/// Parses text that a file holds. throws TraceError; where begins the message
Json parse_json(const std::string& text, const std::string& where);

}  // namespace hae::cli
