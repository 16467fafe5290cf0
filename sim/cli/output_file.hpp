#pragma once

#include <filesystem>
#include <string_view>

namespace hae::cli {

/// Writes a whole file: under a temporary name beside it, then renamed, so that nothing half-written is left.
/// throws OutputError if that is impossible
void write_file(const std::filesystem::path& path, std::string_view text);

}  // namespace hae::cli
