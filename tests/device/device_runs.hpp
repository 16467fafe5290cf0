#pragma once

#include <string>
#include <vector>

#include "cuda/replay.hpp"
#include "sim/cli/device_policy.hpp"
#include "testing/memory_trace.hpp"

namespace hae::testing {

/// The device's runs of one policy over several traces at once.
std::vector<device::DeviceRun> device_runs(const std::vector<const MemoryTrace*>& traces,
                                           const std::string& spec, const device::Options& options = {});

/// Empty when the device left the reference's log behind, bit for bit, and the engine, driven by the device's
/// log and holding it to what the policy promised, measures what it measures of the policy itself; else what
/// differs first.
std::string parity(const MemoryTrace& trace, const std::string& spec, const device::Options& options = {});

/// The same with a run that is there.
std::string parity(const MemoryTrace& trace, const std::string& spec, device::DeviceRun run,
                   const device::Options& options = {});

}  // namespace hae::testing
