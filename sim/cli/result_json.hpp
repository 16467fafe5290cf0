#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sim/cli/comparison.hpp"

namespace hae::cli {

using Json = nlohmann::ordered_json;

inline constexpr const char* kResultSchema = "hae.compare/1";

/// What the file is called in a folder.
inline constexpr const char* kResultName = "result.json";

/// One element of `runs` (docs/results-format.md).
Json run_json(const RunRecord& record);

/// `summary`: one element a policy, with the mean over groups and its 95 % t interval.
///
/// runs    run_json of each run
/// groups  the group label of each run's sequence
Json summary_json(const Json& runs, const std::vector<std::string>& groups);

/// A figure of a summary: mean over groups, each the mean of its sequences, the mean's 95 % t interval (null
/// for one group), and the number of groups; null without observations.
///
/// observations  (group, value) of each sequence
Json group_interval(const std::vector<std::pair<std::string, double>>& observations);

/// `overlap`: how alike the tokens are that every two policies hold at the end. `policies`, and [policies]
/// [policies] `mean` over groups and its 95 % t interval `interval95`; `groups`, their number.
///
/// runs, groups  as of summary_json
Json overlap_json(const Json& runs, const std::vector<std::string>& groups);

/// Several results of one form as one: every number becomes its group_interval. Keys and array elements that
/// only some have are averaged over these.
///
/// results  (group, result) of each sequence
Json group_intervals(const std::vector<std::pair<std::string, Json>>& results);

/// The number, or null.
template <typename Value>
Json json_or_null(const std::optional<Value>& value) {
  return value ? Json(*value) : Json(nullptr);
}

/// A whole result.
///
/// runs, groups  as of summary_json
Json result_json(const Json& manifest, const Json& runs, const std::vector<std::string>& groups);

/// As a result file holds it.
std::string json_text(const Json& json);

/// The figures that `summary` averages and --csv lists, by their path in a run.
std::span<const char* const> run_figures();

/// A figure of a run by its dotted path in run_json, e.g. `decode.missed_mass.mean`; none if it is null.
std::optional<double> figure(const Json& run, std::string_view path);

}  // namespace hae::cli
