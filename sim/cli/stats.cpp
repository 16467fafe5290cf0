#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "sim/cli/command.hpp"
#include "sim/cli/manifest.hpp"
#include "sim/cli/output_file.hpp"
#include "sim/cli/progress.hpp"
#include "sim/cli/replay_options.hpp"
#include "sim/cli/run_table.hpp"
#include "sim/cli/statistics.hpp"
#include "sim/cli/terminal.hpp"
#include "sim/cli/trace_files.hpp"

namespace hae::cli {
namespace {

struct Arguments {
  std::vector<std::string> traces;
  ReplayArguments replay;
  StatisticsQuestion question;
  std::string json;
};

/// One line a layer, and one for all of them.
///
/// cells  the columns of one layer's summary
template <typename Cells>
void print_by_layer(const Json& summary, std::vector<std::string> heading, const Cells& cells) {
  Rows rows{std::move(heading)};
  const auto add = [&](std::string name, const Json& layer) {
    std::vector<std::string>& row = rows.emplace_back(std::vector{std::move(name)});
    std::ranges::move(cells(layer), std::back_inserter(row));
  };
  for (std::size_t layer = 0; layer < summary["layers"].size(); ++layer) {
    add(std::to_string(layer), summary["layers"][layer]);
  }
  add("all", summary["all_layers"]);
  std::fputs(format_table(rows).c_str(), stdout);
}

void print_sparsity(const Json& summary) {
  print_prose(
      "\nshare of probabilities at or below the threshold; variance of the attention that a prompt "
      "token receives from prompt text");
  print_by_layer(summary,
                 {"layer", "prefill", "&visual", "&text", "decode", "&visual", "&text", "variance visual",
                  "&variance text", "&ratio"},
                 [](const Json& layer) {
                   std::vector<std::string> cells;
                   for (const char* rows : {"prefill", "decode"}) {
                     for (const char* keys : {"all", "visual", "text"}) {
                       cells.push_back(mean_text(layer["sparsity"][rows][keys], "{:.4f}"));
                     }
                   }
                   const Json& columns = layer["column_sums"];
                   cells.push_back(mean_text(columns["visual"]["variance"], "{:.3g}"));
                   cells.push_back(mean_text(columns["text"]["variance"], "{:.3g}"));
                   cells.push_back(mean_text(columns["variance_ratio"], "{:.3g}"));
                   return cells;
                 });
}

void print_broadcast(const Json& summary, const StatisticsQuestion& question) {
  if (summary["all_layers"]["broadcast"].is_null()) {
    print_prose("\nbroadcast: not known, no sequence has all rows of prompt text");
    return;
  }
  print_prose(
      "\nshare of layer 0's evicted visual tokens that a layer would evict too, and how many it would "
      "evict (DAP, alpha = {})",
      question.alpha);
  std::vector<std::string> heading{"layer"};
  for (const double r : question.r) {
    heading.push_back(fmt::format("r = {}", r));
    heading.emplace_back("&evicts");
  }
  print_by_layer(summary, heading, [&](const Json& layer) {
    std::vector<std::string> cells;
    for (std::size_t r = 0; r < question.r.size(); ++r) {
      cells.push_back(mean_text(layer["broadcast"]["shared"][r], "{:.3f}"));
      cells.push_back(mean_text(layer["broadcast"]["evicted"][r], "{:.1f}"));
    }
    return cells;
  });
}

void print_ages(const Json& summary, const Json& ages) {
  std::vector<std::string> heading{"layer"};
  for (const Json& bin : ages) {
    const auto [from, to] = bin.get<std::pair<Index, Index>>();
    heading.push_back(from == to ? fmt::format("{}", from) : fmt::format("{}-{}", from, to));
  }
  for (const auto& [kind, all] : summary["all_layers"]["age"].items()) {
    if (std::ranges::all_of(all, [](const Json& mean) { return mean.is_null(); })) {
      continue;
    }
    print_prose("\nmean attention of a decode row to a {} token, by its age in steps",
                kind == "prompt_text" ? "prompt text" : kind);
    print_by_layer(summary, heading, [&, name = kind](const Json& layer) {
      std::vector<std::string> cells;
      for (const Json& mean : layer["age"].at(name)) {
        cells.push_back(mean_text(mean, "{:.5f}"));
      }
      return cells;
    });
  }
}

void print_statistics(const Json& result, const StatisticsQuestion& question) {
  const Json& sequences = result["sequences"];
  Index prompt = 0;
  Index stored = 0;
  Index decode = 0;
  Index masked = 0;
  for (const Json& sequence : sequences) {
    prompt += sequence["rows"]["prompt"].get<Index>();
    stored += sequence["rows"]["prompt_stored"].get<Index>();
    decode += sequence["rows"]["decode"].get<Index>();
    masked += sequence["all_layers"]["masked_rows"].get<Index>();
  }
  print_prose(
      "{} sequence{}, full cache: {} of {} prompt rows and {} decode rows a layer, {} masked rows; "
      "means over groups",
      sequences.size(), sequences.size() == 1 ? "" : "s", stored, prompt, decode, masked);
  print_sparsity(result["summary"]);
  print_broadcast(result["summary"], question);
  print_ages(result["summary"], result["options"]["ages"]);
}

void run(const Arguments& arguments) {
  ComparisonOptions options;
  options.traces = trace_files(arguments.traces);
  options.optimal = false;
  apply(arguments.replay, options);
  check_outputs({arguments.json}, options.traces);
  const Json made_from = arguments.json.empty() ? Json() : manifest(options, {});
  const std::vector<SequenceSource> sources = choose_sequences(options, {});
  Progress bar("reading", static_cast<double>(sources.size()));
  const Json result =
      statistics(sources, arguments.question, made_from, options, [&](double done) { bar.show(done); });
  bar.wipe();
  if (!arguments.json.empty()) {
    write_file(arguments.json, json_text(result));
  }
  print_statistics(result, arguments.question);
}

}  // namespace

void add_stats(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand(
      "stats", "Describe recorded attention: sparsity, column sums, agreement of layers, decay with age");
  add_traces(*command, arguments->traces)->required();
  command
      ->add_option("--threshold", arguments->question.threshold,
                   "A probability at most this counts as sparse")
      ->capture_default_str();
  command
      ->add_option("--r", arguments->question.r,
                   "DAP's r at which layers are compared: numbers, separated by commas")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->capture_default_str();
  command->add_option("--alpha", arguments->question.alpha, "DAP's alpha")->capture_default_str();
  command->add_option("--json", arguments->json, "Write everything to this file (schema hae.stats/1)");
  add_replay_options(*command, arguments->replay);
  command->footer("Example:\n  hae stats traces/data/boards-test.h5 --r 0.0015,0.007 --alpha 0.008");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace hae::cli
