#include "tests/fuzz/target.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "sim/errors.hpp"
#include "tests/fuzz/children.hpp"
#include "traces/check.hpp"
#include "traces/describe.hpp"
#include "traces/trace_file.hpp"

namespace hae::traces::fuzz {
namespace {

[[noreturn]] void fail(const char* what, const std::string& detail) {
  std::fprintf(stderr, "%s: %s\n", what, detail.c_str());
  std::abort();
}

bool is_one_line(const std::string& message) {
  return !message.empty() &&
         std::ranges::none_of(message, [](char letter) { return static_cast<unsigned char>(letter) < 0x20; });
}

}  // namespace

ScratchFile::ScratchFile(const char* name, std::span<const std::uint8_t> bytes) {
  const std::filesystem::path memory = "/dev/shm";
  const std::filesystem::path folder =
      ::access(memory.c_str(), W_OK) == 0 ? memory : std::filesystem::temp_directory_path();
  path_ = folder / ("hae-fuzz-" + std::to_string(::getpid()) + "-" + name);
  std::ofstream(path_, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

ScratchFile::~ScratchFile() {
  std::filesystem::remove(path_);
}

void expect_sound(const std::function<void()>& read) {
  const auto expect_one_line = [](const std::exception& error) {
    if (!is_one_line(error.what())) {
      fail("an error of several lines", error.what());
    }
  };
  try {
    read();
  } catch (const TraceError& error) {
    expect_one_line(error);
  } catch (const ConfigError& error) {
    expect_one_line(error);
  } catch (const std::exception& error) {
    fail("another exception than TraceError and ConfigError", error.what());
  }
  if (const std::string report = report_of_child(); !report.empty()) {
    fail("our own code failed in a child process", report);
  }
}

void expect_sound_import(const std::function<void(const std::filesystem::path& to)>& import) {
  const ScratchFile to("out.h5");
  bool imported = false;
  expect_sound([&] {
    import(to.path());
    imported = true;
  });
  if (imported && read_trace(to.path()) != 0) {
    fail("the importer wrote a trace that does not pass its check", to.path().string());
  }
}

Index read_trace(const std::filesystem::path& path) {
  TraceFile trace(path);
  static_cast<void>(describe(trace));
  return check_trace(trace).total;
}

}  // namespace hae::traces::fuzz
