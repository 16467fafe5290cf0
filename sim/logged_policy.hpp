#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sim/log.hpp"
#include "sim/policy.hpp"

namespace hae {

/// A log of one sequence, to be driven through the engine again.
struct LoggedRun {
  std::string spec;                                          ///< what the policy calls itself
  std::vector<std::pair<std::string, std::string>> options;  ///< what it shows as its options
  std::string where;                                         ///< begins the message of an error
  LaneKind lanes = LaneKind::layer;
  EvictionLog log;
  std::vector<Limits> limits;         ///< [layers, lanes] what the engine holds the log to; empty: nothing
  std::vector<std::string> warnings;  ///< what the run that left the log had to say
};

/// A stored log as a policy: it marks and evicts what the log says, when the log says it, with the scores of
/// the log. So a log of whatever origin (an earlier result, a device, another program) is audited and
/// measured by the one loop that everything else runs through, and replaying a run's own log gives the same
/// log.
///
/// It observes nothing. `begin` checks the log against the sequence: every entry names
/// a layer, lane and token that exist at its step, no token leaves twice, what acts within a prefill acts in
/// every lane of a layer after the first, and marks precede evictions.
///
/// throws  TraceError from begin, `where: entry N (...): what was found, what was expected`
std::shared_ptr<const Policy> logged_policy(LoggedRun run);

}  // namespace hae
