#include <charconv>
#include <cstdio>
#include <cstring>
#include <exception>

#include "sim/errors.hpp"
#include "tests/golden/tables.hpp"

// Makes the golden tables, to write them or to compare them with the committed ones.

namespace hae::testing {
namespace {

constexpr const char* kUsage =
    "usage: golden check ROOT [EVERY]    compares this build with the tables below ROOT/tests/golden;\n"
    "                                    of the recorded sequences only one in EVERY\n"
    "       golden write ROOT            writes them\n";

int check(const GoldenOptions& options) {
  std::size_t lines = 0;
  for (const GoldenFile& file : golden_files()) {
    const GoldenTable made = file.make(options);
    if (const auto difference = first_difference(read_golden(options.root / file.path), made)) {
      std::printf("%s: %s\n", file.path, difference->c_str());
      return 1;
    }
    lines += made.lines.size() - 1;
  }
  std::printf("%zu lines are the same\n", lines);
  return 0;
}

int write(const GoldenOptions& options) {
  for (const GoldenFile& file : golden_files()) {
    write_golden(file.make(options), options.root / file.path);
  }
  return 0;
}

int run(int argc, char** argv) {
  GoldenOptions options;
  if (argc == 3 || argc == 4) {
    options.root = argv[2];
  }
  if (argc == 4) {
    std::from_chars(argv[3], argv[3] + std::strlen(argv[3]), options.every);
  }
  const bool checks = argc > 1 && std::strcmp(argv[1], "check") == 0;
  const bool writes = argc == 3 && std::strcmp(argv[1], "write") == 0;
  if (options.root.empty() || options.every < 1 || !(checks || writes)) {
    std::fputs(kUsage, stderr);
    return 2;
  }
  return checks ? check(options) : write(options);
}

}  // namespace
}  // namespace hae::testing

int main(int argc, char** argv) {
  try {
    return hae::testing::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "golden: %s\n", error.what());
    return 3;
  }
}
