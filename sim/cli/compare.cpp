#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <cstdio>
#include <memory>

#include "sim/cli/command.hpp"
#include "sim/cli/manifest.hpp"
#include "sim/cli/output_file.hpp"
#include "sim/cli/replay_options.hpp"
#include "sim/cli/result_json.hpp"
#include "sim/cli/run_table.hpp"

namespace hae::cli {
namespace {

struct Arguments {
  ComparisonOptions comparison;
  ReplayArguments replay;
  std::string match;
  std::string json;
  std::string csv;
  bool allow_unequal = false;
};

/// The columns of --csv: figures of a run by their path in the JSON.
constexpr std::array kColumns = {
    "tokens.mean",
    "tokens.peak",
    "tokens.final",
    "bytes.mean",
    "bytes.peak",
    "bytes.final",
    "bytes.prefill",
    "decode.missed_mass.mean",
    "decode.missed_mass.max",
    "decode.missed_mass.p50",
    "decode.missed_mass.p95",
    "decode.kl.mean",
    "decode.output_error.mean",
    "decode.output_error_relative.mean",
    "prefill.missed_mass.mean",
    "prefill.output_error_relative.mean",
    "missed_mass_total",
    "removed_all_rows",
    "masked_rows",
    "evictions",
    "events",
    "moved",
    "pending_final",
};

std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) {
    return text;
  }
  std::string quoted = "\"";
  for (const char c : text) {
    quoted += c == '"' ? "\"\"" : std::string(1, c);
  }
  return quoted + "\"";
}

std::string csv_text(const Json& runs) {
  std::string text = "sequence_index,sequence,policy";
  for (const char* column : kColumns) {
    text += fmt::format(",{}", column);
  }
  text += ",unequal\n";
  for (const Json& run : runs) {
    text += fmt::format("{},{},{}", run["sequence"]["index"].get<Index>(),
                        csv_field(run["sequence"]["name"].get<std::string>()),
                        csv_field(run["policy"].get<std::string>()));
    for (const char* column : kColumns) {
      const std::optional<double> value = figure(run, column);
      text += value ? fmt::format(",{}", *value) : ",";
    }
    text += run["unequal"].get<bool>() ? ",true\n" : ",false\n";
  }
  return text;
}

void run(Arguments& arguments) {
  ComparisonOptions& options = arguments.comparison;
  apply(arguments.replay, options);
  check_outputs({arguments.json, arguments.csv}, options.traces);
  if (!arguments.match.empty()) {
    options.match = arguments.match == "peak" ? MatchTarget::peak : MatchTarget::mean;
  }
  Json runs = Json::array();
  std::vector<std::string> groups;
  compare(options, [&](const std::vector<RunRecord>& records) {
    for (const RunRecord& record : records) {
      runs.push_back(run_json(record));
      groups.push_back(record.info.group);
    }
  });
  const Json summary = summary_json(runs, groups);
  if (!arguments.json.empty()) {
    Json result;
    result["schema"] = "hae.compare/1";
    result["manifest"] = manifest(options.traces, options.nan);
    result["manifest"]["match"] = arguments.match.empty() ? Json(nullptr) : Json(arguments.match);
    result["runs"] = runs;
    result["summary"] = summary;
    write_file(arguments.json, result.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
  }
  if (!arguments.csv.empty()) {
    write_file(arguments.csv, csv_text(runs));
  }
  const std::size_t sequences = runs.size() / options.policies.size();
  fmt::print("{} sequence{}, open loop: queries, keys and values are those of the full-cache run\n\n",
             sequences, sequences == 1 ? "" : "s");
  std::fputs(summary_table(summary).c_str(), stdout);
  const std::string warnings = warning_lines(runs);
  fmt::print("{}{}", warnings.empty() ? "" : "\n", warnings);
  const auto unequal =
      std::ranges::count_if(runs, [](const Json& run) { return run["unequal"].get<bool>(); });
  if (unequal > 0 && !arguments.allow_unequal) {
    throw AnswerIsNo(
        fmt::format("{} of {} runs hold more or fewer mean bytes than the first policy's by over 1 % and one "
                    "token a lane; match "
                    "budgets with --match mean, or accept it with --allow-unequal",
                    unequal, runs.size()));
  }
}

}  // namespace

void add_compare(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command =
      app.add_subcommand("compare", "Replay traces through several policies and compare what they lose");
  command->add_option("traces", arguments->comparison.traces, "Trace files")->required()->type_name("TRACE");
  command
      ->add_option("--policy", arguments->comparison.policies,
                   "name or name:key=value,key=value; the first is what others are measured against")
      ->required()
      ->type_name("SPEC")
      ->allow_extra_args(false);
  command
      ->add_option("--match", arguments->match,
                   "Give every policy without a budget the one that comes nearest to the first one's tokens")
      ->check(CLI::IsMember({"mean", "peak"}));
  command->add_option("--json", arguments->json, "Write everything to this file (schema hae.compare/1)");
  command->add_option("--csv", arguments->csv, "Write one line a run to this file");
  command->add_flag("--allow-unequal", arguments->allow_unequal, "Exit 0 though mean bytes differ");
  add_replay_options(*command, arguments->replay);
  command->footer(
      "Example:\n  hae compare traces/data/*.h5 --policy hae:r=0.007,alpha=0.008 --policy greedy --policy "
      "full --match mean");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace hae::cli
