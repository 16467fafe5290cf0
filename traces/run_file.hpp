#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sim/cache.hpp"
#include "sim/log.hpp"
#include "sim/metrics.hpp"

namespace hae::traces {

/// A trace that runs were made from.
struct StoredTrace {
  std::string path;  ///< as it was given
  std::string sha256;

  bool operator==(const StoredTrace&) const = default;
};

/// Which run it was.
struct RunIdentity {
  Index trace = 0;           ///< into StoredRuns::traces
  Index sequence_index = 0;  ///< in that trace
  std::string sequence;
  std::string policy;                                        ///< canonical spec
  std::vector<std::pair<std::string, std::string>> options;  ///< every option as it was run

  bool operator==(const RunIdentity&) const = default;
};

/// One run over one sequence, as a file keeps it.
struct StoredRun {
  RunIdentity identity;
  LaneKind lanes = LaneKind::layer;
  EvictionLog log;

  bool operator==(const StoredRun&) const = default;
};

/// The runs of one command.
struct StoredRuns {
  std::string manifest;  ///< JSON: what they can be repeated from
  std::vector<StoredTrace> traces;
  std::vector<StoredRun> runs;

  bool operator==(const StoredRuns&) const = default;
};

/// Writes runs as HDF5 (layout: FORMAT.md, "Run files"), one after another: under a temporary name, renamed
/// by finish(). One that is destroyed before leaves nothing behind.
///
/// throws  OutputError
class RunWriter {
 public:
  RunWriter(const std::filesystem::path& path, const std::string& manifest,
            const std::vector<StoredTrace>& traces);
  ~RunWriter();
  RunWriter(const RunWriter&) = delete;
  RunWriter& operator=(const RunWriter&) = delete;

  /// The log, and where there are decode steps what was measured in each of them.
  void add(const RunIdentity& identity, const RunResult& result);

  void finish();

 private:
  struct File;
  std::unique_ptr<File> file_;
};

/// Reads identities and logs back, trusting nothing.
///
/// lock    hold a shared lock while the file is read
/// throws  TraceError
StoredRuns read_runs(const std::filesystem::path& path, bool lock = true);

}  // namespace hae::traces
