#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/replay.hpp"
#include "sim/policy.hpp"

namespace hae::cli {

/// Names of the policies that run on a device.
std::vector<std::string> device_policies();

/// Options are read from policy.options(), as resolved, by the parsers of reference/.
///
/// throws  ConfigError for a policy that does not run on a device
device::PolicyRun device_policy(const Policy& policy);

/// The device's run as a policy that drives the engine: audited against what the policy promised, and
/// measured like any stored log. It says what the policy's own run would say.
std::shared_ptr<const Policy> audited(const Policy& policy, const SequenceInfo& info, device::DeviceRun run,
                                      const std::string& where);

}  // namespace hae::cli
