#include "sim/cli/result_folder.hpp"

#include "sim/cli/output_file.hpp"

namespace hae::cli {

namespace fs = std::filesystem;

std::vector<traces::StoredTrace> stored_traces(const Json& manifest) {
  std::vector<traces::StoredTrace> stored;
  for (const Json& trace : manifest["traces"]) {
    stored.push_back({trace["path"].get<std::string>(), trace["sha256"].get<std::string>()});
  }
  return stored;
}

traces::RunIdentity identity_of(const RunRecord& record) {
  return {record.trace, record.index_in_trace, record.info.name, record.spec, record.options};
}

ResultFolder::ResultFolder(const fs::path& path, const Json& manifest)
    : path_(path), runs_(path_ / kRunsName, json_text(manifest), stored_traces(manifest)) {}

void ResultFolder::add(const std::vector<RunRecord>& records) {
  for (const RunRecord& record : records) {
    runs_.add(identity_of(record), record.result);
  }
}

void ResultFolder::finish(const Json& result) {
  const std::unique_ptr<PartialFile> json = written_beside(path_ / kResultName, json_text(result));
  // The old result.json goes first and the new one comes last: in between the folder holds no result.
  std::error_code none;
  fs::remove(path_ / kResultName, none);
  runs_.finish();
  json->commit();
}

}  // namespace hae::cli
