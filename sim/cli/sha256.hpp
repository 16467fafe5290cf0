#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace hae::cli {

/// SHA-256 as 64 hexadecimal digits.
std::string sha256(std::string_view text);

/// SHA-256 of a file's bytes. throws TraceError if it cannot be read
std::string sha256_of_file(const std::filesystem::path& path);

}  // namespace hae::cli
