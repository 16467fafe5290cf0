#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reference/policies.hpp"
#include "sim/policy.hpp"
#include "traces/run_file.hpp"

namespace hae::cli {

/// Every policy that a spec can name: the table's, and `log`.
std::vector<reference::PolicyInfo> known_policies();

/// A policy as a command line names it: one of the table's, or of one's own, for every sequence, or
/// `log:path=RUN.h5`, a stored run, which is another policy for each sequence.
class PolicySource {
 public:
  /// throws  ConfigError for an unknown policy or option; TraceError for a bad run file
  PolicySource(const std::string& spec, bool lock);

  /// A policy that is there already, for every sequence.
  explicit PolicySource(std::shared_ptr<const Policy> policy)
      : spec_(policy->spec()), policy_(std::move(policy)) {}

  /// Canonical spec.
  [[nodiscard]] const std::string& spec() const { return spec_; }

  /// The run file of a stored run; none for a policy of the table.
  [[nodiscard]] const std::optional<std::string>& log_path() const { return log_path_; }

  /// The policy for one sequence.
  ///
  /// trace_sha256  of the sequence's trace; read only for a stored run
  /// throws        TraceError when no stored run is of this sequence
  [[nodiscard]] std::shared_ptr<const Policy> of(const SequenceInfo& sequence,
                                                 const std::string& trace_sha256) const;

 private:
  std::string spec_;
  std::shared_ptr<const Policy> policy_;  ///< null for a log
  std::optional<std::string> log_path_;
  traces::StoredRuns stored_;  ///< the runs of one policy
};

/// Refuses one policy given twice: their runs could not be told apart. throws ConfigError
void check_distinct(const std::vector<PolicySource>& policies);

/// The policies of a command, in its order; run files are read.
///
/// lock    hold a shared lock on a run file while it is read
/// throws  ConfigError for an unknown policy or option, or one policy given twice; TraceError for a bad run
/// file
std::vector<PolicySource> policy_sources(const std::vector<std::string>& specs, bool lock);

}  // namespace hae::cli
