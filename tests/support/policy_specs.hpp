#pragma once

#include <rapidcheck.h>

#include <optional>
#include <string>
#include <vector>

#include "testing/memory_trace.hpp"

namespace hae::testing {

/// Replays one policy spec over a trace.
RunResult run(const MemoryTrace& trace, const std::string& spec, const ReplayOptions& options = {});

/// The same, or nothing: some drawn protections exceed a small prompt's budget.
std::optional<RunResult> possible_run(const MemoryTrace& trace, const std::string& spec,
                                      const ReplayOptions& options = {});

/// Replays several.
std::vector<RunResult> run_all(const MemoryTrace& trace, const std::vector<std::string>& specs,
                               const ReplayOptions& options = {});

/// Runs one policy spec in a closed loop.
ClosedLoop::Finished run_closed(const MemoryTrace& trace, const std::string& spec, Index steps);

/// A spec that is possible for a sequence: any policy of the table, any option.
rc::Gen<std::string> policy_specs(const SequenceInfo& info);

}  // namespace hae::testing
