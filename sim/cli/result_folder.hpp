#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "sim/cli/result_json.hpp"
#include "traces/run_file.hpp"

namespace hae::cli {

inline constexpr const char* kRunsName = "runs.h5";

/// The traces of a manifest.
std::vector<traces::StoredTrace> stored_traces(const Json& manifest);

/// Which run a record is.
traces::RunIdentity identity_of(const RunRecord& record);

/// A folder that keeps everything of a comparison: result.json, and logs and per-step series in runs.h5. What
/// is interrupted leaves no result.json, so nothing looks finished that is not.
class ResultFolder {
 public:
  /// path    a folder that is there
  /// throws  OutputError
  ResultFolder(const std::filesystem::path& path, const Json& manifest);

  void add(const std::vector<RunRecord>& records);

  /// Replaces an earlier result.
  void finish(const Json& result);

 private:
  std::filesystem::path path_;
  traces::RunWriter runs_;
};

}  // namespace hae::cli
