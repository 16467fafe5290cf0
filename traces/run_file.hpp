#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "sim/cache.hpp"
#include "sim/log.hpp"

namespace hae::traces {

/// One run over one sequence, as a file keeps it.
struct StoredRun {
  Index sequence_index = 0;
  std::string sequence;
  std::string policy;                                        ///< canonical spec
  std::vector<std::pair<std::string, std::string>> options;  ///< every option as it was run
  LaneKind lanes = LaneKind::layer;
  EvictionLog log;

  bool operator==(const StoredRun&) const = default;
};

/// Runs over the sequences of one trace.
struct StoredRuns {
  std::string trace;  ///< path
  std::string trace_sha256;
  std::vector<StoredRun> runs;

  bool operator==(const StoredRuns&) const = default;
};

/// Writes runs as HDF5 (layout: FORMAT.md, "Run files"): under a temporary name, then renamed.
/// throws OutputError
void write_runs(const std::filesystem::path& path, const StoredRuns& stored);

/// Reads them back, trusting nothing.
/// throws TraceError
StoredRuns read_runs(const std::filesystem::path& path);

}  // namespace hae::traces
