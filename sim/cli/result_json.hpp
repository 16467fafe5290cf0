#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "sim/cli/comparison.hpp"

namespace hae::cli {

using Json = nlohmann::ordered_json;

/// One element of `runs` of the schema hae.compare/1 (docs/results.md).
Json run_json(const RunRecord& record);

/// `summary`: one element a policy, with the mean over groups and its 95 % t interval.
///
/// runs    run_json of each run
/// groups  the group label of each run's sequence
Json summary_json(const Json& runs, const std::vector<std::string>& groups);

/// A figure of a run by its dotted path in run_json, e.g. `decode.missed_mass.mean`; none if it is null.
std::optional<double> figure(const Json& run, std::string_view path);

}  // namespace hae::cli
