#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sim/cli/policy_source.hpp"
#include "sim/match.hpp"
#include "sim/replay.hpp"

namespace hae::cli {

/// What to replay and how.
struct ComparisonOptions {
  std::vector<std::string> traces;      ///< paths
  std::vector<std::string> policies;    ///< specs
  std::optional<std::string> sequence;  ///< name or index; none: all
  std::optional<MatchTarget> match;
  NanRule nan = NanRule::error;
  bool optimal = true;  ///< search for the bound `optimal`
  Index threads = 0;    ///< 0: one a core
  bool lock = true;
};

/// The files that will be read: traces, and the run files of stored logs.
std::vector<std::string> input_files(const ComparisonOptions& options,
                                     const std::vector<PolicySource>& policies);

/// One policy's run over one sequence.
struct RunRecord {
  Index trace = 0;           ///< into ComparisonOptions::traces
  Index sequence_index = 0;  ///< over all traces, in order
  Index index_in_trace = 0;
  SequenceInfo info;
  std::string spec;                                          ///< canonical, as given
  std::vector<std::pair<std::string, std::string>> options;  ///< as run: a matched budget included
  RunResult result;
  std::optional<double> optimal;  ///< analysis::optimal_totals
  bool unequal = false;
};

/// Replays every sequence of the traces through every policy and hands the runs of each sequence to `take`,
/// in order of traces, sequences and policies, on one thread at a time. As many sequences' measurements are
/// held as there are threads.
///
/// policies  options.policies, by policy_sources()
/// throws    ConfigError for an unknown sequence or an option that turns out impossible; TraceError for a bad
///           trace
void compare(const ComparisonOptions& options, const std::vector<PolicySource>& policies,
             const std::function<void(std::vector<RunRecord>)>& take);

}  // namespace hae::cli
