#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "sim/view.hpp"

// The golden tables: "the same bits everywhere" (docs/arithmetic.md) as text to compare with.

namespace hae::testing {

/// Tab separated: `lines.front()` names the columns; the first kKeyColumns of a line say what it is about.
struct GoldenTable {
  static constexpr Index kKeyColumns = 3;

  std::vector<std::string> lines;
};

/// Where the recordings are, and how many of them to use.
struct GoldenOptions {
  std::filesystem::path root;  ///< of the source tree; recordings are below traces/data
  Index every = 1;             ///< of the recorded sequences, one in so many; all synthetic traces
};

/// Every policy spec over every trace: the log, the missed mass of each row, and figures of it.
///
///   trace  sequence  policy  evictions  pending  log_sha256  missed_mass_sha256  missed_mass_total
///   missed_mass_mean  output_error_mean
///
/// log_sha256 is that of result files; missed_mass_sha256 is of the doubles [layers, query_heads, steps],
/// little endian; numbers are the shortest text that reads back equal, `-` where there is none.
GoldenTable golden_runs(const GoldenOptions& options);

/// Full-cache weights and their sums, before any policy.
///
///   trace  sequence  rows  sha256
///
/// rows is `prompt` or `decode`; sha256 is of the float32 numbers, little endian: layers, query heads and
/// rows ascending, of each row the weights up to the last visible key, then their sum.
GoldenTable golden_weights(const GoldenOptions& options);

/// A table of the source tree and the function that makes it.
struct GoldenFile {
  const char* path;  ///< below the root
  std::function<GoldenTable(const GoldenOptions&)> make;
};
const std::vector<GoldenFile>& golden_files();

/// throws TraceError when the file cannot be read
GoldenTable read_golden(const std::filesystem::path& path);

/// throws OutputError when the file cannot be written
void write_golden(const GoldenTable& table, const std::filesystem::path& path);

/// The first line of `made` that `committed` does not hold, as a message that names line and column; none if
/// there is none. A table of fewer sequences than the committed one agrees with it.
std::optional<std::string> first_difference(const GoldenTable& committed, const GoldenTable& made);

}  // namespace hae::testing
