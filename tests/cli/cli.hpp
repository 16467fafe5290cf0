#pragma once

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

// The program as a user runs it: exit codes, one line of error, files.

namespace hae::testing {

namespace fs = std::filesystem;

inline std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

class Cli : public ::testing::Test {
 protected:
  struct Outcome {
    int code;
    std::string out;
    std::string err;
  };

  Cli() {
    std::string pattern = (fs::temp_directory_path() / "hae-cli-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~Cli() override { fs::remove_all(folder_); }

  /// Runs `hae ARGUMENTS` by a shell in a folder of the test's own.
  Outcome hae(const std::string& arguments, const std::string& environment = "") {
    const std::string command = fmt::format("cd '{}' && {} '{}' {} >out 2>err </dev/null", folder_.string(),
                                            environment, HAE_PROGRAM, arguments);
    const int status = std::system(command.c_str());
    return {WEXITSTATUS(status), read(folder_ / "out"), read(folder_ / "err")};
  }

  void make_trace(const std::string& name, const std::string& more = "") {
    const Outcome made =
        hae(fmt::format("synth --kind heavy-hitters --out {} --layers 2 --query-heads 4 --kv-heads 2 "
                        "--head-dim 8 --prompt 40 --tokens 56 "
                        "--image-tokens 16 {}",
                        name, more));
    ASSERT_EQ(made.code, 0) << made.err;
  }

  static void expect_one_line(const Outcome& outcome, int code) {
    EXPECT_EQ(outcome.code, code) << outcome.err;
    EXPECT_THAT(outcome.err, ::testing::StartsWith("hae: "));
    EXPECT_EQ(std::ranges::count(outcome.err, '\n'), 1) << outcome.err;
  }

  fs::path folder_;
};

}  // namespace hae::testing
