#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <cstdio>
#include <memory>
#include <set>

#include "sim/cli/checks.hpp"
#include "sim/cli/command.hpp"
#include "sim/cli/json_input.hpp"
#include "sim/cli/manifest.hpp"
#include "sim/cli/output_file.hpp"
#include "sim/cli/replay_options.hpp"
#include "sim/cli/result_folder.hpp"
#include "sim/cli/result_json.hpp"
#include "sim/cli/run_table.hpp"
#include "sim/cli/terminal.hpp"
#include "sim/cli/trace_files.hpp"

namespace hae::cli {
namespace {

struct Arguments {
  ComparisonOptions comparison;
  ReplayArguments replay;
  std::string match;
  std::string json;
  std::string csv;
  std::string out;
  std::string junit;
  std::string baseline;
  std::vector<std::string> fail_if;
  bool no_optimal = false;
  bool allow_unequal = false;
  bool kinds = false;
  bool overlap = false;
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
  for (const char* column : run_figures()) {
    text += fmt::format(",{}", column);
  }
  text += ",unequal\n";
  for (const Json& run : runs) {
    text += fmt::format("{},{},{}", run["sequence"]["index"].get<Index>(),
                        csv_field(run["sequence"]["name"].get<std::string>()),
                        csv_field(run["policy"].get<std::string>()));
    for (const char* column : run_figures()) {
      const std::optional<double> value = figure(run, column);
      text += value ? fmt::format(",{}", *value) : ",";
    }
    text += run["unequal"].get<bool>() ? ",true\n" : ",false\n";
  }
  return text;
}

/// What a comparison is held to, read and checked before any work.
struct Expectations {
  std::vector<Rule> rules;
  std::optional<Json> baseline;
};

std::optional<Json> baseline_summary(const Expectations& expected) {
  return expected.baseline ? std::optional((*expected.baseline)["summary"]) : std::nullopt;
}

Expectations expectations(const Arguments& arguments) {
  Expectations expected;
  for (const std::string& rule : arguments.fail_if) {
    expected.rules.push_back(parse_rule(rule));
  }
  const bool relative = std::ranges::any_of(expected.rules, &Rule::relative);
  if (relative && arguments.baseline.empty()) {
    throw ConfigError("--fail-if with a multiple (x) needs --baseline, a result to compare with");
  }
  if (!relative && !arguments.baseline.empty()) {
    throw ConfigError("--baseline needs a --fail-if with a multiple, e.g. 'missed_mass.mean>1.05x'");
  }
  if (relative) {
    expected.baseline = read_result(arguments.baseline);
  }
  return expected;
}

/// Refuses a rule that names no policy of the comparison, or one that the baseline lacks, before any work.
void check_policies(const Expectations& expected, const std::vector<PolicySource>& policies) {
  Json lines = Json::array();  // a summary without figures: what is refused does not depend on them
  for (const PolicySource& policy : policies) {
    Json line;
    line["policy"] = policy.spec();
    lines.push_back(line);
  }
  (void)check_rules(expected.rules, lines, baseline_summary(expected));
}

/// A baseline of other data would be compared with in vain.
void check_same_data(const Json& baseline, const Json& manifest, const std::string& path) {
  const auto hashes = [](const Json& of) {
    std::multiset<std::string> all;
    for (const Json& trace : of["traces"]) {
      all.insert(trace["sha256"].get<std::string>());
    }
    return all;
  };
  const bool same_options = std::ranges::all_of(std::array{"sequence", "match", "nan"}, [&](const char* key) {
    return baseline["manifest"].value(key, Json()) == manifest[key];
  });
  if (hashes(baseline["manifest"]) != hashes(manifest) || !same_options) {
    throw ConfigError(
        path +
        ": was measured on other traces, or with another --sequence, --match or --nan, than are "
        "compared now; make a baseline of these");
  }
}

void print_comparison(const Json& result, const Arguments& arguments) {
  const Json& runs = result["runs"];
  const Json& summary = result["summary"];
  const std::size_t sequences = runs.size() / summary.size();
  print_prose("{} sequence{}, open loop: queries, keys and values are those of the full-cache run\n",
              sequences, sequences == 1 ? "" : "s");
  std::fputs(summary_table(summary).c_str(), stdout);
  const std::string shown_bars = is_terminal(stdout) ? bars(summary) : "";
  fmt::print("{}{}", shown_bars.empty() ? "" : "\n", shown_bars);
  if (arguments.kinds) {
    print_prose(
        "\nevictions by kind of token, and the share of each kind's tokens that is kept to the end; text of "
        "the prompt, before and after its first visual token");
    std::fputs(kinds_table(summary).c_str(), stdout);
  }
  if (arguments.overlap) {
    print_prose(
        "\noverlap of what two policies keep to the end, |A ∩ B| / |A ∪ B|: mean over layers and lanes");
    std::fputs(overlap_table(result["overlap"]).c_str(), stdout);
  }
  const std::string warnings = warning_lines(runs);
  fmt::print("{}{}", warnings.empty() ? "" : "\n", warnings);
}

/// Prints the rules' checks and throws when one of any kind failed.
void conclude(const std::vector<Check>& checks, std::size_t rule_checks) {
  for (std::size_t i = 0; i < rule_checks; ++i) {
    const Check& check = checks[i];
    fmt::print("{}{}: {} ({}: {})\n", i == 0 ? "\n" : "",
               check.passed ? painted("ok", fmt::fg(fmt::terminal_color::green))
                            : painted("FAILED", fmt::fg(fmt::terminal_color::red)),
               check.name, check.policy, check.message);
  }
  const auto failed = [](const Check& check) { return !check.passed; };
  const auto first = std::ranges::find_if(checks, failed);
  if (first != checks.end()) {
    throw AnswerIsNo(fmt::format(
        "{} of {} checks failed, first '{}' of {}: {}{}", std::ranges::count_if(checks, failed),
        checks.size(), first->name, first->policy, first->message,
        first->name == kEqualBytes ? "; match budgets with --match mean, or accept it with --allow-unequal"
                                   : ""));
  }
}

/// Before any work: every output can be made, and replaces nothing that is read.
void check_files(const Arguments& arguments, const std::vector<PolicySource>& policies) {
  std::vector<std::string> inputs = input_files(arguments.comparison, policies);
  if (!arguments.baseline.empty()) {
    inputs.push_back(result_path(arguments.baseline).string());
  }
  std::vector<std::string> outputs{arguments.json, arguments.csv, arguments.junit};
  if (!arguments.out.empty()) {
    for (const char* name : {kResultName, kRunsName}) {
      outputs.push_back((std::filesystem::path(arguments.out) / name).string());
    }
  }
  check_outputs(outputs, inputs);
}

/// The whole result.
///
/// folder  keeps logs and series as they come; may be null
Json measure(const ComparisonOptions& options, const std::vector<PolicySource>& policies,
             const Json& made_from, ResultFolder* folder) {
  Json runs = Json::array();
  std::vector<std::string> groups;
  compare(options, policies, [&](const std::vector<RunRecord>& records) {
    for (const RunRecord& record : records) {
      runs.push_back(run_json(record));
      groups.push_back(record.info.group);
    }
    if (folder != nullptr) {
      folder->add(records);
    }
  });
  return result_json(made_from, runs, groups);
}

void run(Arguments& arguments) {
  ComparisonOptions& options = arguments.comparison;
  apply(arguments.replay, options);
  options.traces = trace_files(options.traces);
  options.optimal = !arguments.no_optimal;
  if (!arguments.match.empty()) {
    options.match = arguments.match == "peak" ? MatchTarget::peak : MatchTarget::mean;
  }
  const std::vector<PolicySource> policies = policy_sources(options.policies, options.lock);
  std::optional<OutputFolder> kept_in;
  if (!arguments.out.empty()) {
    kept_in.emplace(arguments.out);
  }
  check_files(arguments, policies);
  const Expectations expected = expectations(arguments);
  check_policies(expected, policies);
  const bool keeps = !arguments.json.empty() || kept_in || expected.baseline;
  const Json made_from = keeps ? manifest(options, policies) : Json();
  if (expected.baseline) {
    check_same_data(*expected.baseline, made_from, arguments.baseline);
  }
  std::optional<ResultFolder> folder;
  if (kept_in) {
    folder.emplace(kept_in->path(), made_from);
  }
  const Json result = measure(options, policies, made_from, folder ? &*folder : nullptr);
  std::vector<Check> checks = check_rules(expected.rules, result["summary"], baseline_summary(expected));
  const std::size_t rule_checks = checks.size();
  std::ranges::move(check_equal_bytes(result["summary"], arguments.allow_unequal),
                    std::back_inserter(checks));
  if (folder) {
    folder->finish(result);
  }
  if (!arguments.json.empty()) {
    write_file(arguments.json, json_text(result));
  }
  if (!arguments.csv.empty()) {
    write_file(arguments.csv, csv_text(result["runs"]));
  }
  if (!arguments.junit.empty()) {
    write_file(arguments.junit, junit_text("hae compare", checks));
  }
  print_comparison(result, arguments);
  conclude(checks, rule_checks);
}

}  // namespace

void add_compare(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command =
      app.add_subcommand("compare", "Replay traces through several policies and compare what they lose");
  add_traces(*command, arguments->comparison.traces)->required();
  command
      ->add_option("--policy", arguments->comparison.policies,
                   "name or name:key=value,key=value; the first is what others are measured against")
      ->required()
      ->type_name(kPolicySpec)
      ->allow_extra_args(false);
  command
      ->add_option("--match", arguments->match,
                   "Give every policy without a budget the one that comes nearest to the first one's tokens")
      ->check(CLI::IsMember({"mean", "peak"}));
  command->add_option("--json", arguments->json, "Write everything to this file (schema hae.compare/1)");
  command->add_option("--csv", arguments->csv, "Write one line a run to this file");
  command
      ->add_option("--out", arguments->out,
                   "Keep everything in this folder: result.json, and logs and per-step series in runs.h5")
      ->type_name("DIR");
  command->add_flag("--kinds", arguments->kinds,
                    "Also print which kinds of tokens each policy evicted and kept");
  command->add_flag("--overlap", arguments->overlap,
                    "Also print how alike the tokens are that every two policies kept");
  command->add_flag("--no-optimal", arguments->no_optimal, "Do not search for the bound `optimal`");
  command
      ->add_option(
          "--fail-if", arguments->fail_if,
          "Exit 1 if this holds: [POLICY:]FIGURE OP NUMBER, or NUMBERx for a multiple of the baseline's")
      ->type_name("RULE")
      ->allow_extra_args(false);
  command->add_option("--baseline", arguments->baseline, "An earlier result that --fail-if compares with")
      ->type_name("OLD.json");
  command->add_option("--junit", arguments->junit,
                      "Write what passed and what failed to this file (JUnit XML)");
  command->add_flag("--allow-unequal", arguments->allow_unequal, "Exit 0 though mean bytes differ");
  add_replay_options(*command, arguments->replay);
  command->footer(
      "Example:\n  hae compare traces/data/*.h5 --policy hae:r=0.007,alpha=0.008 --policy greedy --policy "
      "full --match mean");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace hae::cli
