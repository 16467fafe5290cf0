#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <cstdio>
#include <memory>

#include "sim/cli/command.hpp"
#include "sim/cli/manifest.hpp"
#include "sim/cli/output_file.hpp"
#include "sim/cli/replay_options.hpp"
#include "sim/cli/result_folder.hpp"
#include "sim/cli/run_table.hpp"

namespace hae::cli {
namespace {

struct Arguments {
  std::string trace;
  std::string policy;
  std::string out;
  bool events = false;
  ReplayArguments replay;
};

void print_summary(const Json& runs, const std::vector<std::string>& groups) {
  std::fputs(summary_table(summary_json(runs, groups)).c_str(), stdout);
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
  options.optimal = false;
  apply(arguments.replay, options);
  const std::vector<PolicySource> policies = policy_sources(options.policies, options.lock);
  check_outputs({arguments.out}, input_files(options, policies));
  std::optional<traces::RunWriter> out;
  if (!arguments.out.empty()) {
    const Json made_from = manifest(options, policies);
    out.emplace(arguments.out, json_text(made_from), stored_traces(made_from));
  }
  Json runs = Json::array();
  std::vector<std::string> groups;
  std::vector<std::pair<Index, EvictionLog>> logs;  // with the sequence's index
  compare(options, policies, [&](std::vector<RunRecord> records) {
    RunRecord& record = records.front();
    runs.push_back(run_json(record));
    groups.push_back(record.info.group);
    if (out) {
      out->add(identity_of(record), record.result);
    }
    if (arguments.events) {
      logs.emplace_back(record.index_in_trace, std::move(record.result.log));
    }
  });
  if (out) {
    out->finish();
  }
  if (!arguments.events) {
    print_summary(runs, groups);
    return;
  }
  for (const auto& [index, log] : logs) {
    std::fputs(to_json_lines(log, logs.size() > 1 ? std::optional(index) : std::nullopt).c_str(), stdout);
  }
}

}  // namespace

void add_replay(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand("replay", "Replay a trace through one policy");
  command->add_option("trace", arguments->trace, "Trace file")->required()->type_name("TRACE");
  command->add_option("--policy", arguments->policy, "name or name:key=value,key=value")
      ->required()
      ->type_name(kPolicySpec);
  command->add_option("--out", arguments->out, "Write the eviction log to this file (HDF5)")
      ->type_name("RUN.h5");
  command->add_flag("--events", arguments->events,
                    "Print the eviction log as JSON lines instead of a summary");
  add_replay_options(*command, arguments->replay);
  command->footer("Example:\n  hae replay trace.h5 --policy hae:bin=16,budget=128 --events");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace hae::cli
