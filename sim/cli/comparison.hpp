#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

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

/// The policies' canonical specs, before any work.
/// throws  ConfigError for an unknown policy or option, or one policy given twice; TraceError for a bad run
/// file
std::vector<std::string> canonical_specs(const ComparisonOptions& options);

/// The files that will be read: traces, and the run files of stored logs.
/// throws  ConfigError for a bad spec of a stored log
std::vector<std::string> input_files(const ComparisonOptions& options);

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
/// throws  ConfigError for an unknown policy, option or sequence; TraceError for a bad trace
void compare(const ComparisonOptions& options, const std::function<void(std::vector<RunRecord>)>& take);

}  // namespace hae::cli
