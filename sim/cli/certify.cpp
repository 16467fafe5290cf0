#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "sim/cli/certification.hpp"
#include "sim/cli/command.hpp"
#include "sim/cli/manifest.hpp"
#include "sim/cli/output_file.hpp"
#include "sim/cli/progress.hpp"
#include "sim/cli/replay_options.hpp"
#include "sim/cli/run_table.hpp"
#include "sim/cli/terminal.hpp"
#include "sim/cli/trace_files.hpp"

namespace hae::cli {
namespace {

struct Arguments {
  std::vector<std::string> traces;
  std::string policy;
  CertificateQuestion question;
  ReplayArguments replay;
  std::string json;
  std::string junit;
};

/// A number in four digits, `-` for null.
std::string short_number(const Json& number) {
  if (number.is_null()) {
    return "-";
  }
  return number.is_string() ? number.get<std::string>() : fmt::format("{:.4g}", number.get<double>());
}

/// What a reader wants to know of a claim first.
std::string verdict_text(const Json& claim) {
  const auto verdict = claim["verdict"].get<std::string>();
  if (claim["status"] == "refuted" && verdict != "does not apply") {
    return verdict == "fails" ? "fails, as refuted" : "holds here, though refuted";
  }
  return verdict;
}

void print_loss(const Json& result) {
  const Json& loss = result["loss"];
  const Json& conformal = loss["conformal"];
  print_prose("{}\n{} sequence{}, open loop; loss: mean missed mass of a sequence's decode rows\n",
              result["policy"].get<std::string>(), loss["sequences"].size(),
              loss["sequences"].size() == 1 ? "" : "s");
  fmt::print("largest measured loss   {}, epsilon {}\n", short_number(loss["measured"]),
             short_number(result["epsilon"]));
  const double sure = 1.0 - conformal["delta"].get<double>();
  if (conformal["bound"].is_null()) {
    print_prose("a new sequence          no bound: {} groups, at least {} are needed for probability {:.4g}",
                conformal["groups"].get<Index>(), conformal["groups_needed"].get<Index>(), sure);
  } else {
    print_prose(
        "a new sequence          at most {} with probability {:.4g}, if it is exchangeable with these {} "
        "groups",
        short_number(conformal["bound"]), sure, conformal["groups"].get<Index>());
  }
}

void print_claims(const Json& claims) {
  Rows rows{{"claim", "status", "measured", "bound", "slack", "cases", "verdict"}};
  for (const Json& claim : claims) {
    rows.push_back({claim["id"].get<std::string>() + "  " + claim["title"].get<std::string>(),
                    claim["status"].get<std::string>(), short_number(claim["measured"]),
                    short_number(claim["bound"]), short_number(claim["slack"]),
                    fmt::format("{}", claim["cases"].get<Index>()), verdict_text(claim)});
  }
  fmt::print("\n{}", format_table(rows));
  fmt::print("\nwhere a claim does not apply\n");
  for (const Json& claim : claims) {
    if (!claim["applies"].get<bool>()) {
      constexpr std::size_t kIndent = 18;
      fmt::print("  {:<15} {}", claim["id"].get<std::string>(),
                 paragraph(claim["unmet"].get<std::string>(), kIndent));
    }
  }
}

void print_decay(const Json& decay) {
  print_prose(
      "\nattention that evicted tokens would still receive is at most A (1-λ)^age; R3: all that one may "
      "lose");
  Rows rows{
      {"layer", "evictions", "A", "&λ", "R3", "fitted on half: A", "&λ", "exceeded in", "&95 % interval"}};
  const auto add = [&](const std::string& name, const Json& layer) {
    std::vector<std::string>& row = rows.emplace_back();
    row = {name, fmt::format("{}", layer["evictions"].get<Index>())};
    for (const char* key : {"initial", "rate", "future_loss_of_one"}) {
      row.push_back(layer["envelope"].is_null() ? "-" : short_number(layer["envelope"][key]));
    }
    for (const char* key : {"initial", "rate"}) {
      row.push_back(layer["fitted"].is_null() ? "-" : short_number(layer["fitted"][key]));
    }
    const Json& tested = layer["tested"];
    row.push_back(tested.is_null() ? "-"
                                   : fmt::format("{} of {} groups", tested["exceeding"].get<Index>(),
                                                 tested["groups"].get<Index>()));
    row.push_back(tested.is_null() ? "-"
                                   : fmt::format("{:.3f} to {:.3f}", tested["interval95"][0].get<double>(),
                                                 tested["interval95"][1].get<double>()));
  };
  for (const Json& layer : decay["layers"]) {
    add(fmt::format("{}", layer["layer"].get<Index>()), layer);
  }
  add("all", decay["all_layers"]);
  std::fputs(format_table(rows).c_str(), stdout);
}

void print_safe(const Json& safe, const Json& epsilon) {
  print_prose("\nwhat the proved bounds allow for a loss of at most {}", short_number(epsilon));
  Rows rows{{"parameter", "allowed", "used here", "measured loss"}};
  if (!safe["k"].is_null()) {
    rows.push_back({"k, steps with one eviction each (R1)", short_number(safe["k"]["largest"]), "-",
                    short_number(safe["k"]["measured"])});
    rows.push_back(
        {fmt::format("k, steps to wait before {} tokens go (R2)", safe["wait"]["tokens"].get<Index>()),
         safe["wait"]["least"].is_null() ? "none" : short_number(safe["wait"]["least"]), "-", "-"});
    rows.push_back({"D, tokens that go together (R3)", short_number(safe["bin"]["largest"]),
                    short_number(safe["bin"]["used"]), short_number(safe["bin"]["measured"])});
  }
  if (!safe["r"].is_null()) {
    rows.push_back({fmt::format("r, with {} candidates (DAP.share)", safe["r"]["candidates"].get<Index>()),
                    short_number(safe["r"]["largest"]), "-", short_number(safe["r"]["measured"])});
  }
  if (rows.size() == 1) {
    fmt::print("nothing was evicted that would have received attention\n");
    return;
  }
  std::fputs(format_table(rows).c_str(), stdout);
}

void print_certificate(const Json& result) {
  print_loss(result);
  print_claims(result["claims"]);
  if (!result["own_scores"].is_null()) {
    print_prose(
        "\nG1 is about scores=full. With the policy's own scores greedy eviction of the same budget is at "
        "best {} better in a row, over {} rows",
        short_number(result["own_scores"]["largest_difference"]), result["own_scores"]["rows"].get<Index>());
  }
  print_decay(result["decay"]);
  print_safe(result["safe"], result["epsilon"]);
}

/// A proved claim that fails is about us or the mathematics, and comes before any answer.
void conclude(const std::vector<Check>& checks) {
  const auto failed_claim = std::ranges::find_if(
      checks, [](const Check& check) { return !check.passed && check.name != kLossCheck; });
  if (failed_claim != checks.end()) {
    throw ClaimFailed(
        fmt::format("{} is proved and fails on a trace that meets its assumptions: {}; please "
                    "report it with the trace",
                    failed_claim->name, failed_claim->message));
  }
  if (!checks.front().passed) {
    throw AnswerIsNo(checks.front().message);
  }
}

void run(const Arguments& arguments) {
  ComparisonOptions options;
  options.traces = trace_files(arguments.traces);
  options.policies = {arguments.policy};
  options.optimal = false;
  apply(arguments.replay, options);
  const std::vector<PolicySource> policies = policy_sources(options.policies, options.lock);
  check_outputs({arguments.json, arguments.junit}, input_files(options, policies));
  const Json made_from = arguments.json.empty() ? Json() : manifest(options, policies);
  const std::vector<SequenceSource> sources = choose_sequences(options, policies);
  Progress bar("certifying", static_cast<double>(sources.size()));
  const Json result = certification(sources, policies.front(), arguments.question, made_from, options,
                                    [&](double done) { bar.show(done); });
  bar.wipe();
  const std::vector<Check> checks = certificate_checks(result);
  if (!arguments.json.empty()) {
    write_file(arguments.json, json_text(result));
  }
  if (!arguments.junit.empty()) {
    write_file(arguments.junit, junit_text("hae certify", checks));
  }
  print_certificate(result);
  conclude(checks);
}

}  // namespace

void add_certify(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand(
      "certify", "Check every claim on traces: assumptions, measured loss, bound; bounds for new sequences");
  add_traces(*command, arguments->traces)->required();
  command->add_option("--policy", arguments->policy, "name or name:key=value,key=value")
      ->required()
      ->type_name(kPolicySpec);
  command
      ->add_option("--epsilon", arguments->question.epsilon,
                   "The loss that may be: exit 1 if a sequence's mean missed mass is larger")
      ->required();
  command
      ->add_option("--delta", arguments->question.delta,
                   "How often the bound for a new sequence may be wrong")
      ->capture_default_str();
  command->add_option("--json", arguments->json, "Write everything to this file (schema hae.certify/1)");
  command->add_option("--junit", arguments->junit,
                      "Write what passed and what failed to this file (JUnit XML)");
  add_replay_options(*command, arguments->replay);
  command->footer(
      "Example:\n  hae certify traces/data/*.h5 --policy hae:r=0.007,alpha=0.008 --epsilon 0.9 --junit "
      "certificate.xml");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace hae::cli
