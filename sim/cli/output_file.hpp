#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "sim/partial_file.hpp"

namespace hae::cli {

/// Writes a whole file, or nothing: see PartialFile. A device or a pipe is written to as it is.
/// throws OutputError
void write_file(const std::filesystem::path& path, std::string_view text);

/// Writes a whole file beside its target; the caller commits it.
/// throws OutputError
std::unique_ptr<PartialFile> written_beside(const std::filesystem::path& path, std::string_view text);

/// A folder for outputs: made where it is missing, with its parents; what was made is gone again if nothing
/// was put into it.
class OutputFolder {
 public:
  /// throws  OutputError
  explicit OutputFolder(std::filesystem::path path);
  ~OutputFolder();
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  std::vector<std::filesystem::path> made_;  ///< what was missing, outermost first
};

/// Before any work: every output can be made, and none is an input or another output.
///
/// outputs  empty names are ignored
/// throws   ConfigError, OutputError
void check_outputs(const std::vector<std::string>& outputs, const std::vector<std::string>& inputs);

}  // namespace hae::cli
