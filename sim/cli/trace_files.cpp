#include "sim/cli/trace_files.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <system_error>

#include "sim/errors.hpp"

namespace hae::cli {
namespace {

namespace fs = std::filesystem;

/// What cannot be opened stays in the list: opening it says why, and leaving it out would say nothing.
bool is_trace_file(const fs::path& path) {
  std::error_code unknown;
  return path.extension() == ".h5" && !path.filename().string().starts_with('.') &&
         !fs::is_directory(path, unknown);
}

std::vector<std::string> files_in(const std::string& folder) {
  std::error_code error;
  std::vector<std::string> files;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (is_trace_file(entry->path())) {
      files.push_back(entry->path().string());
    }
  }
  if (error) {
    throw TraceError(fmt::format("{}: cannot be listed ({}); make the folder readable, or name trace files",
                                 folder, error.message()));
  }
  if (files.empty()) {
    throw TraceError(folder + ": holds no *.h5 file; name a folder that does, or trace files");
  }
  std::ranges::sort(files);
  return files;
}

}  // namespace

std::vector<std::string> trace_files(const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    std::error_code unknown;
    if (fs::is_directory(path, unknown)) {
      std::ranges::move(files_in(path), std::back_inserter(files));
    } else {
      files.push_back(path);
    }
  }
  return files;
}

}  // namespace hae::cli
