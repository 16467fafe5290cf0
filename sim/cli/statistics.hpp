#pragma once

#include <functional>
#include <vector>

#include "sim/cli/comparison.hpp"
#include "sim/cli/result_json.hpp"

namespace hae::cli {

inline constexpr const char* kStatisticsSchema = "hae.stats/1";

/// What is asked of recorded attention.
struct StatisticsQuestion {
  double threshold = 1e-4;                                        ///< a probability at most this is sparse
  std::vector<double> r = {0.0005, 0.001, 0.0015, 0.003, 0.006};  ///< of DAP, each compared over layers
  double alpha = 0.0005;                                          ///< of DAP
};

/// A whole result of schema hae.stats/1 (docs/results-format.md): sequences in order, and their averages over
/// groups.
///
/// manifest  null for sequences in memory
/// options   nan and threads
/// progress  as compare's
/// throws    ConfigError for a number that is negative or not finite; TraceError for a bad trace
Json statistics(const std::vector<SequenceSource>& sources, const StatisticsQuestion& question,
                const Json& manifest, const ComparisonOptions& options,
                const std::function<void(double)>& progress);

}  // namespace hae::cli
