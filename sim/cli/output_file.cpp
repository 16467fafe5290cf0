#include "sim/cli/output_file.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "sim/errors.hpp"
#include "sim/partial_file.hpp"

namespace hae::cli {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void cannot_write(const fs::path& name, const std::string& reason) {
  throw OutputError(name.string() + ": cannot be written (" + reason + "); choose another path");
}

void write_into(const fs::path& path, std::string_view text, const fs::path& name) {
  errno = 0;
  std::ofstream file(path, std::ios::binary);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  file.close();
  if (!file) {
    cannot_write(name, std::strerror(errno));
  }
}

bool is_special(const fs::path& path) {
  std::error_code unknown;
  return fs::exists(path, unknown) && !fs::is_regular_file(path, unknown) && !fs::is_directory(path, unknown);
}

/// Whether both names lead to one file, there already or not yet.
bool same_file(const std::string& a, const std::string& b) {
  std::error_code unknown;
  return fs::equivalent(a, b, unknown) ||
         fs::weakly_canonical(behind_links(a), unknown) == fs::weakly_canonical(behind_links(b), unknown);
}

}  // namespace

void write_file(const fs::path& path, std::string_view text) {
  if (is_special(path)) {
    write_into(path, text, path);
    return;
  }
  written_beside(path, text)->commit();
}

std::unique_ptr<PartialFile> written_beside(const fs::path& path, std::string_view text) {
  auto file = std::make_unique<PartialFile>(path);
  write_into(file->path(), text, path);
  return file;
}

OutputFolder::OutputFolder(fs::path path) : path_(std::move(path)) {
  std::error_code error;
  for (fs::path missing = fs::absolute(path_, error); !missing.empty() && !fs::exists(missing, error);
       missing = missing.parent_path()) {
    made_.insert(made_.begin(), missing);
  }
  fs::create_directories(path_, error);
  if (!fs::is_directory(path_)) {
    throw OutputError(path_.string() + ": is no folder and cannot be made one" +
                      (error ? " (" + error.message() + ")" : "") + "; choose another path");
  }
}

OutputFolder::~OutputFolder() {
  std::error_code not_empty;
  while (!made_.empty() && (fs::remove(made_.back(), not_empty), !not_empty)) {
    made_.pop_back();
  }
}

void check_outputs(const std::vector<std::string>& outputs, const std::vector<std::string>& inputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const std::string& output = outputs[i];
    if (output.empty() || is_special(output)) {
      continue;
    }
    if (fs::is_directory(output)) {
      cannot_write(output, "is a folder");
    }
    for (const std::string& input : inputs) {
      if (same_file(output, input)) {
        throw ConfigError("'" + output +
                          "' is an input of this command and would be overwritten; choose another path");
      }
    }
    for (std::size_t j = 0; j < i; ++j) {
      if (!outputs[j].empty() && same_file(output, outputs[j])) {
        throw ConfigError("'" + output + "' is named for two outputs; choose another path for one of them");
      }
    }
    const fs::path folder = behind_links(output).parent_path();
    if (::access(folder.empty() ? "." : folder.c_str(), W_OK) != 0) {
      cannot_write(output, std::strerror(errno));
    }
  }
}

}  // namespace hae::cli
