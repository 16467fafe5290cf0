#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sim/cli/device_backend.hpp"
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
  std::string backend = kReferenceBackend;  ///< what runs the policies; the engine measures what it did
  bool optimal = true;                      ///< search for the bound `optimal`
  Index threads = 0;                        ///< 0: one a core
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
  std::string backend = kReferenceBackend;
  RunResult result;
  std::optional<double> optimal;  ///< analysis::optimal_totals
  bool unequal = false;
  std::vector<double> overlap = {1.0};  ///< [runs of the sequence] kept_overlap, its own run included
};

/// One sequence to replay, of a file or of arrays in memory.
struct SequenceSource {
  std::shared_ptr<TraceSource> trace;
  Index trace_index = 0;  ///< into ComparisonOptions::traces
  Index index_in_trace = 0;
  Index sequence_index = 0;  ///< over all traces, in order
  std::string trace_sha256;  ///< of the file; empty where no stored log has to be matched to it
};

/// The sequences that the options choose; opens options.traces.
///
/// throws  ConfigError for an unknown sequence; TraceError for a bad trace
std::vector<SequenceSource> choose_sequences(const ComparisonOptions& options,
                                             const std::vector<PolicySource>& policies);

/// Replays the sequences through every policy and hands the runs of each sequence to `take`, in order of
/// sequences and policies, on one thread at a time. As many sequences' measurements are held as there are
/// threads.
///
/// options   match, nan, optimal and threads
/// progress  is told now and then how many sequences are done, in [0, sequences]; it may throw to stop
/// throws    ConfigError for an option that turns out impossible; TraceError for a bad trace
void compare(const std::vector<SequenceSource>& sequences, const std::vector<PolicySource>& policies,
             const ComparisonOptions& options, const std::function<void(double)>& progress,
             const std::function<void(std::vector<RunRecord>)>& take);

/// The same for the sequences that the options choose, with a progress bar.
void compare(const ComparisonOptions& options, const std::vector<PolicySource>& policies,
             const std::function<void(std::vector<RunRecord>)>& take);

}  // namespace hae::cli
