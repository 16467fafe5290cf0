#include "sim/cli/result_json.hpp"

#include <algorithm>
#include <cmath>
#include <map>

#include "analysis/interval.hpp"
#include "sim/cli/sha256.hpp"

namespace hae::cli {
namespace {

Json metric_json(const std::optional<Summary>& summary) {
  if (!summary) {
    return {{"mean", nullptr}, {"max", nullptr}, {"p50", nullptr}, {"p95", nullptr}};
  }
  return {{"mean", summary->mean}, {"max", summary->max}, {"p50", summary->p50}, {"p95", summary->p95}};
}

/// Null when the population has no row at all.
Json series_json(const Series& series) {
  if (series.rows == 0) {
    return nullptr;
  }
  Json json;
  for (const Metric metric : kMetrics) {
    json[name(metric)] = metric_json(summarise(series.all(metric)));
  }
  return json;
}

/// Means of each layer: {missed_mass: [layers], ...}.
Json per_layer_json(const Series& series) {
  if (series.rows == 0) {
    return nullptr;
  }
  Json json;
  for (const Metric metric : kMetrics) {
    Json means = Json::array();
    for (Index layer = 0; layer < series.layers; ++layer) {
      const std::optional<Summary> summary = summarise(series.layer(metric, layer));
      means.push_back(summary ? Json(summary->mean) : Json(nullptr));
    }
    json[name(metric)] = std::move(means);
  }
  return json;
}

/// missed_mass_total, the bound `optimal` and what lies between them, and the mean of top_now; null without
/// decode steps, and where no optimum was searched.
void add_bounds(Json& json, const RunRecord& record) {
  const Series& decode = record.result.decode;
  const bool has_rows = record.info.steps() > 0 && !record.result.merges;
  const double total = missed_mass_total(decode);
  json["missed_mass_total"] = has_rows ? Json(total) : Json(nullptr);
  json["optimal"] = json_or_null(record.optimal);
  json["optimal_mean"] = nullptr;
  json["regret"] = nullptr;
  if (record.optimal) {
    const auto rows =
        std::ranges::count_if(decode.all(Metric::missed_mass), [](double m) { return !std::isnan(m); });
    json["optimal_mean"] = rows > 0 ? Json(*record.optimal / static_cast<double>(rows)) : Json(nullptr);
    json["regret"] = total - *record.optimal;
  }
  const std::optional<Summary> top_now = summarise(record.result.top_now);
  json["top_now"] = top_now ? Json(top_now->mean) : Json(nullptr);
}

/// One value a layer; where its lanes differ, the list of the lanes' values.
template <typename Value>
Json by_layer(const RunRecord& record, const Value& value) {
  Json layers = Json::array();
  const Index lanes = lane_count(record.info, record.result.lanes);
  for (auto lane = record.result.limits.begin(); lane != record.result.limits.end(); lane += lanes) {
    Json values = Json::array();
    std::transform(lane, lane + lanes, std::back_inserter(values), value);
    const bool agree = std::ranges::all_of(values, [&](const Json& v) { return v == values.front(); });
    layers.push_back(agree ? values.front() : values);
  }
  return layers;
}

Json resolved_json(const RunRecord& record) {
  return {{"budget", by_layer(record, [](const Limits& l) { return json_or_null(l.budget); })},
          {"bin", by_layer(record, [](const Limits& l) { return json_or_null(l.bin); })},
          {"recent",
           by_layer(record, [](const Limits& l) { return l.budget ? Json(l.recent) : Json(nullptr); })}};
}

Json bytes_json(const RunRecord& record) {
  const std::optional<Bytes> bytes = count_bytes(record.info, record.result);
  if (!bytes) {
    return {{"mean", nullptr}, {"peak", nullptr}, {"final", nullptr}, {"prefill", nullptr}};
  }
  return {{"mean", json_or_null(bytes->mean)},
          {"peak", json_or_null(bytes->peak)},
          {"final", bytes->final},
          {"prefill", bytes->prefill}};
}

Json tokens_json(const RunRecord& record) {
  if (record.info.steps() == 0) {
    return nullptr;
  }
  const Tokens tokens = count_tokens(record.info, record.result);
  return {{"mean", json_or_null(tokens.mean)}, {"peak", json_or_null(tokens.peak)}, {"final", tokens.final}};
}

/// {visual: ..., ...}
template <typename Value>
Json kinds_json(const ByKind<Value>& values) {
  Json json;
  for (const TokenKind kind : kTokenKinds) {
    json[name(kind)] = json_or_null(std::optional(values[static_cast<std::size_t>(kind)]));
  }
  return json;
}

/// The runs of each policy, policies in the order of their first run.
std::vector<std::pair<std::string, std::vector<std::size_t>>> by_policy(const Json& runs) {
  std::vector<std::pair<std::string, std::vector<std::size_t>>> policies;
  std::map<std::string, std::size_t> places;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const auto policy = runs[i]["policy"].get<std::string>();
    const auto [place, is_new] = places.try_emplace(policy, policies.size());
    if (is_new) {
      policies.emplace_back(policy, std::vector<std::size_t>{});
    }
    policies[place->second].second.push_back(i);
  }
  return policies;
}

/// The figures that `summary` averages and --csv lists.
constexpr std::array kFigures = {
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
    "decode.missed_pull.mean",
    "decode.kl.mean",
    "decode.output_error.mean",
    "decode.output_error_relative.mean",
    "prefill.missed_mass.mean",
    "prefill.missed_pull.mean",
    "prefill.output_error_relative.mean",
    "missed_mass_total",
    "optimal",
    "optimal_mean",
    "regret",
    "top_now",
    "removed_all_rows",
    "masked_rows",
    "lowered_weights",
    "evictions",
    "events",
    "moved",
    "pending_final",
    "evicted_kinds.visual",
    "evicted_kinds.text_before",
    "evicted_kinds.text_after",
    "evicted_kinds.generated",
    "kept_kinds.visual",
    "kept_kinds.text_before",
    "kept_kinds.text_after",
    "kept_kinds.generated",
};

}  // namespace

std::span<const char* const> run_figures() {
  return kFigures;
}

Json group_interval(const std::vector<std::pair<std::string, double>>& observations) {
  std::vector<std::string> order;
  std::map<std::string, std::vector<double>> groups;
  for (const auto& [group, value] : observations) {
    std::vector<double>& members = groups[group];
    if (members.empty()) {
      order.push_back(group);
    }
    members.push_back(value);
  }
  std::vector<double> means;
  for (const std::string& group : order) {
    double sum = 0.0;
    for (const double value : groups[group]) {
      sum += value;
    }
    means.push_back(sum / static_cast<double>(groups[group].size()));
  }
  if (means.empty()) {
    return nullptr;
  }
  double sum = 0.0;
  for (const double mean : means) {
    sum += mean;
  }
  const std::optional<analysis::Interval> interval = analysis::mean_interval(means);
  return {{"mean", sum / static_cast<double>(means.size())},
          {"interval95", interval ? Json::array({interval->low, interval->high}) : Json(nullptr)},
          {"groups", means.size()}};
}

Json group_intervals(const std::vector<std::pair<std::string, Json>>& results) {
  std::vector<std::pair<std::string, double>> observations;
  std::vector<std::string> order;  // keys, or indices of array elements
  std::map<std::string, std::vector<std::pair<std::string, Json>>> parts;
  for (const auto& [group, result] : results) {
    if (result.is_number()) {
      observations.emplace_back(group, result.get<double>());
    }
    if (!result.is_structured()) {
      continue;
    }
    for (const auto& [key, part] : result.items()) {
      if (parts[key].empty()) {
        order.push_back(key);
      }
      parts[key].emplace_back(group, part);
    }
  }
  if (order.empty()) {
    return group_interval(observations);
  }
  const bool are_arrays = std::ranges::any_of(results, [](const auto& of) { return of.second.is_array(); });
  Json summary = are_arrays ? Json::array() : Json::object();
  for (const std::string& key : order) {
    Json part = group_intervals(parts[key]);
    if (are_arrays) {
      summary.push_back(std::move(part));
    } else {
      summary[key] = std::move(part);
    }
  }
  return summary;
}

std::optional<double> figure(const Json& run, std::string_view path) {
  const Json* node = &run;
  while (!path.empty()) {
    const std::string_view key = path.substr(0, path.find('.'));
    path.remove_prefix(std::min(path.size(), key.size() + 1));
    if (!node->is_object() || !node->contains(key)) {
      return std::nullopt;
    }
    node = &(*node)[std::string(key)];
  }
  return node->is_number() ? std::optional(node->get<double>()) : std::nullopt;
}

Json run_json(const RunRecord& record) {
  const RunResult& result = record.result;
  Json json;
  json["sequence"] = {{"index", record.sequence_index}, {"name", record.info.name}};
  json["policy"] = record.spec;
  json["options"] = Json::object();
  for (const auto& [key, value] : record.options) {
    json["options"][key] = value;
  }
  json["resolved"] = resolved_json(record);
  json["backend"] = record.backend;
  json["tokens"] = tokens_json(record);
  json["bytes"] = bytes_json(record);
  json["decode"] = series_json(result.decode);
  json["prefill"] = series_json(result.prefill);
  add_bounds(json, record);
  json["removed_all_rows"] = result.removed_all_rows;
  json["masked_rows"] = result.masked_rows;
  json["lowered_weights"] = result.lowered_weights;
  json["per_layer"] = {{"decode", per_layer_json(result.decode)},
                       {"prefill", per_layer_json(result.prefill)}};
  json["evictions"] = result.log.entries.size();
  json["events"] = count_events(result.log);
  json["moved"] = result.moved;
  json["pending_final"] = result.log.pending.size();
  json["evicted_kinds"] = kinds_json(count_evicted_kinds(record.info, result.log));
  json["kept_kinds"] = kinds_json(kept_kinds(record.info, result));
  json["overlap"] = record.overlap;
  json["log_sha256"] = sha256(to_json_lines(result.log));
  json["unequal"] = record.unequal;
  json["warnings"] = result.warnings;
  return json;
}

Json result_json(const Json& manifest, const Json& runs, const std::vector<std::string>& groups) {
  Json result;
  result["schema"] = kResultSchema;
  result["manifest"] = manifest;
  result["runs"] = runs;
  result["summary"] = summary_json(runs, groups);
  result["overlap"] = overlap_json(runs, groups);
  return result;
}

std::string json_text(const Json& json) {
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Json summary_json(const Json& runs, const std::vector<std::string>& groups) {
  Json summary = Json::array();
  for (const auto& [policy, members] : by_policy(runs)) {
    Json line;
    line["policy"] = policy;
    line["sequences"] = members.size();
    for (const char* path : kFigures) {
      std::vector<std::pair<std::string, double>> observations;
      for (const std::size_t i : members) {
        if (const std::optional<double> value = figure(runs[i], path)) {
          observations.emplace_back(groups[i], *value);
        }
      }
      line[path] = group_interval(observations);
    }
    line["unequal"] =
        std::ranges::any_of(members, [&](std::size_t i) { return runs[i]["unequal"].get<bool>(); });
    summary.push_back(std::move(line));
  }
  return summary;
}

Json overlap_json(const Json& runs, const std::vector<std::string>& groups) {
  Json overlap = {
      {"policies", Json::array()}, {"mean", Json::array()}, {"interval95", Json::array()}, {"groups", 0}};
  const auto policies = by_policy(runs);
  for (const auto& [policy, members] : policies) {
    Json means = Json::array();
    Json intervals = Json::array();
    for (std::size_t other = 0; other < policies.size(); ++other) {
      std::vector<std::pair<std::string, double>> observations;
      for (const std::size_t i : members) {
        observations.emplace_back(groups[i], runs[i]["overlap"][other].get<double>());
      }
      const Json figure = group_interval(observations);
      means.push_back(figure["mean"]);
      intervals.push_back(figure["interval95"]);
      overlap["groups"] = figure["groups"];
    }
    overlap["policies"].push_back(policy);
    overlap["mean"].push_back(std::move(means));
    overlap["interval95"].push_back(std::move(intervals));
  }
  return overlap;
}

}  // namespace hae::cli
