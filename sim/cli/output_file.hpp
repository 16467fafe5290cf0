#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace hae::cli {

/// Writes a whole file, or nothing: see PartialFile. A device or a pipe is written to as it is.
/// throws OutputError
void write_file(const std::filesystem::path& path, std::string_view text);

/// Before any work: every output can be made, and none is an input or another output.
///
/// outputs  empty names are ignored
/// throws   ConfigError, OutputError
void check_outputs(const std::vector<std::string>& outputs, const std::vector<std::string>& inputs);

}  // namespace hae::cli
