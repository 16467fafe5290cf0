#include "sim/cli/output_file.hpp"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>

#include "sim/errors.hpp"

namespace hae::cli {
namespace {

void write_into(const std::filesystem::path& path, std::string_view text, const std::filesystem::path& name) {
  errno = 0;
  std::ofstream file(path, std::ios::binary);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  file.close();
  if (!file) {
    throw OutputError(name.string() + ": cannot be written (" + std::strerror(errno) +
                      "); choose another path");
  }
}

/// What a symbolic link, or a chain of them, points to; it need not exist yet.
std::filesystem::path behind_links(std::filesystem::path path) {
  constexpr int kLongestChain = 40;
  std::error_code unknown;
  for (int links = 0; links < kLongestChain && std::filesystem::is_symlink(path, unknown); ++links) {
    path = path.parent_path() / std::filesystem::read_symlink(path, unknown);
  }
  return path;
}

}  // namespace

void write_file(const std::filesystem::path& name, std::string_view text) {
  std::error_code unknown;
  const std::filesystem::path path = behind_links(name);
  if (std::filesystem::exists(path, unknown) && !std::filesystem::is_regular_file(path, unknown)) {
    write_into(path, text, name);  // A device or a pipe is written to, never replaced.
    return;
  }
  const std::filesystem::path partial = path.string() + ".partial";
  try {
    write_into(partial, text, name);
  } catch (const OutputError&) {
    std::filesystem::remove(partial, unknown);
    throw;
  }
  std::error_code error;
  std::filesystem::rename(partial, path, error);
  if (error) {
    std::filesystem::remove(partial, unknown);
    throw OutputError(name.string() + ": cannot be written (" + error.message() + "); choose another path");
  }
}

}  // namespace hae::cli
