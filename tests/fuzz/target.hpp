#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>

#include "sim/view.hpp"

// What a fuzz target is made of. A target is one file that defines
//   extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size)
// and one line in CMakeLists.txt.

namespace hae::traces::fuzz {

/// A file of this process in memory (`/dev/shm`), or where there is none in the folder for temporary files;
/// gone at the end.
class ScratchFile {
 public:
  explicit ScratchFile(const char* name, std::span<const std::uint8_t> bytes = {});
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// Runs `read`, which is to end or to throw a TraceError or ConfigError that says one line. Ends the process
/// on any other exception, on a message of several lines, and when our own code failed in a child process
/// that the library took for a crash of HDF5.
void expect_sound(const std::function<void()>& read);

/// Runs an importer under expect_sound(); a trace that it wrote must pass its check.
void expect_sound_import(const std::function<void(const std::filesystem::path& to)>& import);

/// Opens a trace and reads everything it holds. Returns how many of its numbers are wrong.
Index read_trace(const std::filesystem::path& path);

}  // namespace hae::traces::fuzz
