#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "sim/cli/command.hpp"
#include "sim/cli/replay_options.hpp"
#include "sim/cli/result_json.hpp"
#include "sim/cli/run_table.hpp"
#include "sim/cli/sha256.hpp"
#include "traces/run_file.hpp"

namespace hae::cli {
namespace {

struct Arguments {
  std::string trace;
  std::string policy;
  std::string out;
  bool events = false;
  ReplayArguments replay;
};

void write_run(const std::string& path, const std::string& trace, const std::vector<RunRecord>& records) {
  traces::StoredRuns stored;
  stored.trace = trace;
  stored.trace_sha256 = sha256_of_file(trace);
  for (const RunRecord& record : records) {
    stored.runs.push_back({record.index_in_trace, record.info.name, record.spec, record.options, record.result.lanes,
                           record.result.log});
  }
  traces::write_runs(path, stored);
}

void print_summary(const std::vector<RunRecord>& records) {
  Json runs = Json::array();
  for (const RunRecord& record : records) {
    runs.push_back(run_json(record));
  }
  std::fputs(summary_table(summary_json(records, runs)).c_str(), stdout);
  for (const Json& run : runs) {
    fmt::print("{}: log sha256 {}, {} pending at the end\n", run["sequence"]["name"].get<std::string>(),
               run["log_sha256"].get<std::string>(), run["pending_final"].get<Index>());
  }
  std::fputs(warning_lines(runs).c_str(), stdout);
}

void run(const Arguments& arguments) {
  ComparisonOptions options;
  options.traces = {arguments.trace};
  options.policies = {arguments.policy};
  apply(arguments.replay, options);
  const std::vector<RunRecord> records = compare(options);
  if (!arguments.out.empty()) {
    write_run(arguments.out, arguments.trace, records);
  }
  if (!arguments.events) {
    print_summary(records);
    return;
  }
  const bool several = records.size() > 1;
  for (const RunRecord& record : records) {
    std::fputs(to_json_lines(record.result.log, several ? std::optional(record.index_in_trace) : std::nullopt).c_str(),
               stdout);
  }
}

}  // namespace

void add_replay(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand("replay", "Replay a trace through one policy");
  command->add_option("trace", arguments->trace, "Trace file")->required()->type_name("TRACE");
  command->add_option("--policy", arguments->policy, "name or name:key=value,key=value")->required()->type_name("SPEC");
  command->add_option("--out", arguments->out, "Write the eviction log to this file (HDF5)")->type_name("RUN.h5");
  command->add_flag("--events", arguments->events, "Print the eviction log as JSON lines instead of a summary");
  add_replay_options(*command, arguments->replay);
  command->footer("Example:\n  hae replay trace.h5 --policy hae:bin=16,budget=128 --events");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace hae::cli
