#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>

#include "analysis/attention_statistics.hpp"
#include "reference/dual_attention_pruning.hpp"
#include "sim/cli/command.hpp"
#include "sim/cli/manifest.hpp"
#include "sim/cli/output_file.hpp"
#include "sim/cli/parallel.hpp"
#include "sim/cli/progress.hpp"
#include "sim/cli/replay_options.hpp"
#include "sim/cli/run_table.hpp"

namespace hae::cli {
namespace {

using analysis::AttentionStatistics;

constexpr const char* kSchema = "hae.stats/1";
constexpr std::array kKeyKindNames = {"visual", "prompt_text", "generated"};  // by analysis::KeyKind

struct Arguments {
  std::vector<std::string> traces;
  ReplayArguments replay;
  double threshold = 1e-4;
  std::vector<double> r = {0.0005, 0.001, 0.0015, 0.003, 0.006};
  double alpha = 0.0005;
  std::string json;
};

/// Every layer decides for itself, by HAE's DAP, which of its visual tokens it would evict: once for each r.
class LayerDecisions {
 public:
  LayerDecisions(const SequenceInfo& info, const Arguments& arguments) {
    for (Index layer = 0; layer < info.layers; ++layer) {
      std::vector<reference::DualAttentionPruning>& of_layer = pruning_.emplace_back();
      for (const double r : arguments.r) {
        const reference::PruningOptions options{
            .r = r, .alpha = arguments.alpha, .broadcast = reference::PruningOptions::Broadcast::none};
        of_layer.emplace_back(info, options, /*sinks=*/0);
      }
    }
  }

  /// Layers may come at the same time.
  void observe(const Rows& rows) {
    for (reference::DualAttentionPruning& pruning : pruning_[at(rows.layer())]) {
      pruning.observe(rows);
    }
  }

  /// [layers][r] tokens, ascending.
  [[nodiscard]] std::vector<std::vector<std::vector<Index>>> evicted() const {
    std::vector<std::vector<std::vector<Index>>> sets;
    for (const std::vector<reference::DualAttentionPruning>& of_layer : pruning_) {
      std::vector<std::vector<Index>>& layer_sets = sets.emplace_back();
      for (const reference::DualAttentionPruning& pruning : of_layer) {
        std::vector<Index>& tokens = layer_sets.emplace_back();
        for (const Evict& evict : pruning.decide(static_cast<Index>(sets.size()) - 1).evict) {
          tokens.push_back(evict.token);
        }
      }
    }
    return sets;
  }

 private:
  std::vector<std::vector<reference::DualAttentionPruning>> pruning_;  ///< [layers][r]
};

/// DAP decides by all rows of prompt text.
bool has_all_text_rows(const SequenceInfo& info) {
  for (Index row = 0; row < info.prompt; ++row) {
    if (!info.is_visual(row) && !std::ranges::binary_search(info.prompt_rows, row)) {
      return false;
    }
  }
  return true;
}

Json sparsity_json(const analysis::Sparsity& sparsity) {
  return {{"all", json_or_null(sparsity.all().share())},
          {"visual", json_or_null(sparsity.visual.share())},
          {"text", json_or_null(sparsity.text.share())}};
}

Json columns_json(const AttentionStatistics& statistics) {
  const auto described = [](const std::optional<analysis::ColumnSums>& columns) -> Json {
    return columns
               ? Json{{"tokens", columns->tokens}, {"mean", columns->mean}, {"variance", columns->variance}}
               : Json{{"tokens", 0}, {"mean", nullptr}, {"variance", nullptr}};
  };
  const auto& [visual, text] = std::tie(statistics.visual_columns, statistics.text_columns);
  std::optional<double> ratio;
  if (visual && text && std::isfinite(visual->variance / text->variance)) {
    ratio = visual->variance / text->variance;
  }
  return {{"visual", described(visual)}, {"text", described(text)}, {"variance_ratio", json_or_null(ratio)}};
}

Json statistics_json(const AttentionStatistics& statistics) {
  Json json;
  json["sparsity"] = {{"prefill", sparsity_json(statistics.prefill)},
                      {"decode", sparsity_json(statistics.decode)}};
  json["column_sums"] = columns_json(statistics);
  for (std::size_t kind = 0; kind < kKeyKindNames.size(); ++kind) {
    Json means = Json::array();
    for (const analysis::AgedAttention& aged : statistics.age[kind]) {
      means.push_back(json_or_null(aged.mean()));
    }
    json["age"][kKeyKindNames[kind]] = std::move(means);
  }
  json["masked_rows"] = statistics.masked_rows;
  json["lowered_weights"] = statistics.lowered_weights;
  return json;
}

/// Share of layer 0's set that a layer's set holds; none where layer 0 evicts nothing.
std::optional<double> shared(const std::vector<Index>& layer0, const std::vector<Index>& layer) {
  if (layer0.empty()) {
    return std::nullopt;
  }
  const auto both =
      std::ranges::count_if(layer0, [&](Index token) { return std::ranges::binary_search(layer, token); });
  return static_cast<double>(both) / static_cast<double>(layer0.size());
}

/// Adds `broadcast` to each layer, and to all_layers its mean over the layers above layer 0 (of `evicted`:
/// over all layers), layers ascending.
void add_broadcast(Json& json, const std::optional<LayerDecisions>& decisions) {
  if (!decisions) {
    for (Json& layer : json["layers"]) {
      layer["broadcast"] = nullptr;
    }
    json["all_layers"]["broadcast"] = nullptr;
    return;
  }
  const std::vector<std::vector<std::vector<Index>>> evicted = decisions->evicted();
  const auto layers = static_cast<double>(evicted.size());
  Json& all = json["all_layers"]["broadcast"] = {{"evicted", Json::array()}, {"shared", Json::array()}};
  for (std::size_t r = 0; r < evicted.front().size(); ++r) {
    Index total = 0;
    double shares = 0.0;
    for (std::size_t layer = 0; layer < evicted.size(); ++layer) {
      const std::optional<double> share = shared(evicted[0][r], evicted[layer][r]);
      Json& of_layer = json["layers"][layer]["broadcast"];
      of_layer["evicted"].push_back(evicted[layer][r].size());
      of_layer["shared"].push_back(json_or_null(share));
      total += static_cast<Index>(evicted[layer][r].size());
      shares += layer > 0 ? share.value_or(0.0) : 0.0;
    }
    const bool is_known = !evicted[0][r].empty() && evicted.size() > 1;
    all["evicted"].push_back(static_cast<double>(total) / layers);
    all["shared"].push_back(is_known ? Json(shares / (layers - 1.0)) : Json(nullptr));
  }
}

struct SequenceStatistics {
  Json json;
  std::string group;
  Index tokens = 0;
};

SequenceStatistics describe(const SequenceSource& source, const Arguments& arguments,
                            const ComparisonOptions& options, const Parallel& parallel,
                            std::function<void(double)> progress) {
  const std::unique_ptr<Sequence> sequence = source.trace->open(source.index_in_trace);
  const SequenceInfo& info = sequence->info();
  std::optional<LayerDecisions> decisions;
  analysis::StatisticsOptions statistics_options{.threshold = arguments.threshold,
                                                 .nan = options.nan,
                                                 .for_each = parallel.for_each(),
                                                 .progress = std::move(progress)};
  if (has_all_text_rows(info)) {
    decisions.emplace(info, arguments);
    statistics_options.observe_prompt = [&](const Rows& rows) { decisions->observe(rows); };
  }
  const std::vector<AttentionStatistics> layers =
      analysis::attention_statistics(*sequence, statistics_options, source.trace->name());
  Json json;
  json["sequence"] = {{"index", source.sequence_index}, {"name", info.name}};
  json["group"] = info.group;
  json["rows"] = {
      {"prompt", info.prompt}, {"prompt_stored", info.prompt_rows.size()}, {"decode", info.steps()}};
  json["visual_tokens"] = std::count_if(info.image.begin(), info.image.begin() + info.prompt,
                                        [](Index image) { return image >= 0; });
  json["layers"] = Json::array();
  for (const AttentionStatistics& layer : layers) {
    json["layers"].push_back(statistics_json(layer));
  }
  json["all_layers"] = statistics_json(analysis::over_layers(layers));
  add_broadcast(json, decisions);
  return {std::move(json), info.group, info.tokens};
}

/// What is averaged over groups.
Json summary_of(const std::vector<SequenceStatistics>& sequences) {
  std::vector<std::pair<std::string, Json>> results;
  for (const SequenceStatistics& sequence : sequences) {
    results.emplace_back(sequence.group, Json{{"layers", sequence.json["layers"]},
                                              {"all_layers", sequence.json["all_layers"]}});
  }
  Json summary = group_intervals(results);
  Json json{{"sequences", sequences.size()}};
  json.update(summary);
  return json;
}

Json options_json(const Arguments& arguments, const std::vector<SequenceStatistics>& sequences) {
  Index most_tokens = 1;
  for (const SequenceStatistics& sequence : sequences) {
    most_tokens = std::max(most_tokens, sequence.tokens);
  }
  Json bins = Json::array();
  for (Index bin = 0; bin <= analysis::age_bin(most_tokens - 1); ++bin) {
    const Range ages = analysis::ages_of_bin(bin);
    bins.push_back({ages.begin, ages.end - 1});
  }
  return {{"threshold", arguments.threshold}, {"r", arguments.r}, {"alpha", arguments.alpha}, {"ages", bins}};
}

/// One line a layer, and one for all of them.
///
/// cells  the columns of one layer's summary
template <typename Cells>
void print_by_layer(const Json& summary, std::vector<std::string> heading, const Cells& cells) {
  std::vector<std::vector<std::string>> rows{std::move(heading)};
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
  fmt::print(
      "\nshare of probabilities at or below the threshold; variance of the attention that a prompt "
      "token receives from prompt text\n");
  print_by_layer(summary,
                 {"layer", "prefill", "visual", "text", "decode", "visual", "text", "variance visual",
                  "variance text", "ratio"},
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

void print_broadcast(const Json& summary, const Arguments& arguments) {
  if (summary["all_layers"]["broadcast"].is_null()) {
    fmt::print("\nbroadcast: not known, no sequence has all rows of prompt text\n");
    return;
  }
  fmt::print(
      "\nshare of layer 0's evicted visual tokens that a layer would evict too, and how many it would "
      "evict (DAP, alpha = {})\n",
      arguments.alpha);
  std::vector<std::string> heading{"layer"};
  for (const double r : arguments.r) {
    heading.push_back(fmt::format("r = {}", r));
    heading.emplace_back("evicts");
  }
  print_by_layer(summary, heading, [&](const Json& layer) {
    std::vector<std::string> cells;
    for (std::size_t r = 0; r < arguments.r.size(); ++r) {
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
  for (const char* kind : kKeyKindNames) {
    const Json& all = summary["all_layers"]["age"][kind];
    if (std::ranges::all_of(all, [](const Json& mean) { return mean.is_null(); })) {
      continue;
    }
    fmt::print("\nmean attention of a decode row to a {} token, by its age in steps\n",
               kind == kKeyKindNames[1] ? "prompt text" : kind);
    print_by_layer(summary, heading, [&](const Json& layer) {
      std::vector<std::string> cells;
      for (const Json& mean : layer["age"][kind]) {
        cells.push_back(mean_text(mean, "{:.5f}"));
      }
      return cells;
    });
  }
}

void print_statistics(const Json& result, const Arguments& arguments) {
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
  fmt::print(
      "{} sequence{}, full cache: {} of {} prompt rows and {} decode rows a layer, {} masked rows; "
      "means over groups\n",
      sequences.size(), sequences.size() == 1 ? "" : "s", stored, prompt, decode, masked);
  print_sparsity(result["summary"]);
  print_broadcast(result["summary"], arguments);
  print_ages(result["summary"], result["options"]["ages"]);
}

void check_numbers(const Arguments& arguments) {
  const auto check = [](const char* option, double value) {
    if (!std::isfinite(value) || value < 0.0) {
      throw ConfigError(fmt::format("{} is {}, expected a finite number of 0 or more", option, value));
    }
  };
  check("--threshold", arguments.threshold);
  check("--alpha", arguments.alpha);
  for (const double r : arguments.r) {
    check("--r", r);
  }
}

void run(const Arguments& arguments) {
  check_numbers(arguments);
  ComparisonOptions options;
  options.traces = arguments.traces;
  options.optimal = false;
  apply(arguments.replay, options);
  check_outputs({arguments.json}, options.traces);
  const Json made_from = arguments.json.empty() ? Json() : manifest(options, {});
  const std::vector<SequenceSource> sources = choose_sequences(options, {});
  const Parallel parallel(options.threads);
  Progress bar("reading", static_cast<double>(sources.size()));
  ProgressSum progress([&](double done) { bar.show(done); });
  std::vector<SequenceStatistics> sequences(sources.size());
  parallel.in_order(
      static_cast<Index>(sources.size()),
      [&](Index i) {
        sequences[at(i)] = describe(sources[at(i)], arguments, options, parallel, progress.task());
      },
      [](Index) {});
  Json result{{"schema", kSchema}, {"manifest", made_from}, {"options", options_json(arguments, sequences)}};
  result["sequences"] = Json::array();
  for (const SequenceStatistics& sequence : sequences) {
    result["sequences"].push_back(sequence.json);
  }
  result["summary"] = summary_of(sequences);
  if (!arguments.json.empty()) {
    write_file(arguments.json, json_text(result));
  }
  print_statistics(result, arguments);
}

}  // namespace

void add_stats(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand(
      "stats", "Describe recorded attention: sparsity, column sums, agreement of layers, decay with age");
  command->add_option("traces", arguments->traces, "Trace files")->required()->type_name("TRACE");
  command->add_option("--threshold", arguments->threshold, "A probability at most this counts as sparse")
      ->capture_default_str();
  command
      ->add_option("--r", arguments->r, "DAP's r at which layers are compared: numbers, separated by commas")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->capture_default_str();
  command->add_option("--alpha", arguments->alpha, "DAP's alpha")->capture_default_str();
  command->add_option("--json", arguments->json, "Write everything to this file (schema hae.stats/1)");
  add_replay_options(*command, arguments->replay);
  command->footer("Example:\n  hae stats traces/data/boards-test.h5 --r 0.0015,0.007 --alpha 0.008");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace hae::cli
