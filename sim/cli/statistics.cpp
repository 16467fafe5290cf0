#include "sim/cli/statistics.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "analysis/attention_statistics.hpp"
#include "reference/dual_attention_pruning.hpp"
#include "sim/cli/parallel.hpp"
#include "sim/cli/progress.hpp"

namespace hae::cli {
namespace {

using analysis::AttentionStatistics;

constexpr std::array kKeyKindNames = {"visual", "prompt_text", "generated"};  // by analysis::KeyKind

/// Every layer decides for itself, by HAE's DAP, which of its visual tokens it would evict: once for each r.
class LayerDecisions {
 public:
  LayerDecisions(const SequenceInfo& info, const StatisticsQuestion& question) {
    for (Index layer = 0; layer < info.layers; ++layer) {
      std::vector<reference::DualAttentionPruning>& of_layer = pruning_.emplace_back();
      for (const double r : question.r) {
        const reference::PruningOptions options{
            .r = r, .alpha = question.alpha, .broadcast = reference::PruningOptions::Broadcast::none};
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

SequenceStatistics describe(const SequenceSource& source, const StatisticsQuestion& question,
                            const ComparisonOptions& options, const Parallel& parallel,
                            std::function<void(double)> progress) {
  const std::unique_ptr<Sequence> sequence = source.trace->open(source.index_in_trace);
  const SequenceInfo& info = sequence->info();
  std::optional<LayerDecisions> decisions;
  analysis::StatisticsOptions statistics_options{.threshold = question.threshold,
                                                 .nan = options.nan,
                                                 .for_each = parallel.for_each(),
                                                 .progress = std::move(progress)};
  if (has_all_text_rows(info)) {
    decisions.emplace(info, question);
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

Json options_json(const StatisticsQuestion& question, const std::vector<SequenceStatistics>& sequences) {
  Index most_tokens = 1;
  for (const SequenceStatistics& sequence : sequences) {
    most_tokens = std::max(most_tokens, sequence.tokens);
  }
  Json bins = Json::array();
  for (Index bin = 0; bin <= analysis::age_bin(most_tokens - 1); ++bin) {
    const Range ages = analysis::ages_of_bin(bin);
    bins.push_back({ages.begin, ages.end - 1});
  }
  return {{"threshold", question.threshold}, {"r", question.r}, {"alpha", question.alpha}, {"ages", bins}};
}

void check_numbers(const StatisticsQuestion& question) {
  const auto check = [](const char* option, double value) {
    if (!std::isfinite(value) || value < 0.0) {
      throw ConfigError(fmt::format("{} is {}, expected a finite number of 0 or more", option, value));
    }
  };
  check("threshold", question.threshold);
  check("alpha", question.alpha);
  if (question.r.empty()) {
    throw ConfigError("r is empty, expected at least one number");
  }
  for (const double r : question.r) {
    check("r", r);
  }
}

}  // namespace

Json statistics(const std::vector<SequenceSource>& sources, const StatisticsQuestion& question,
                const Json& manifest, const ComparisonOptions& options,
                const std::function<void(double)>& progress) {
  check_numbers(question);
  const Parallel parallel(options.threads);
  ProgressSum sum(progress);
  std::vector<SequenceStatistics> sequences(sources.size());
  parallel.in_order(
      static_cast<Index>(sources.size()),
      [&](Index i) { sequences[at(i)] = describe(sources[at(i)], question, options, parallel, sum.task()); },
      [](Index) {});
  Json result;
  result["schema"] = kStatisticsSchema;
  result["manifest"] = manifest;
  result["options"] = options_json(question, sequences);
  result["sequences"] = Json::array();
  for (const SequenceStatistics& sequence : sequences) {
    result["sequences"].push_back(sequence.json);
  }
  result["summary"] = summary_of(sequences);
  return result;
}

}  // namespace hae::cli
