#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/replay.hpp"
#include "sim/policy.hpp"

namespace hae::cli {

/// A policy of the table as the device backend runs it, and what it says of its budgets.
struct DevicePolicy {
  device::PolicyRun run;

  /// The budget that is held against a layer's window, given the residents after pruning; none: no warning.
  std::function<std::optional<Index>(Index residents)> budget;
};

/// Names of the policies that run on a device.
std::vector<std::string> device_policies();

/// Options are read from policy.options(), as resolved, by the parsers of reference/.
///
/// throws  ConfigError for a policy that does not run on a device
DevicePolicy device_policy(const Policy& policy);

/// The device's run as a policy that drives the engine: audited against what the policy promised, and
/// measured like any stored log. It says what the policy's own run would say.
std::shared_ptr<const Policy> audited(const Policy& policy, const DevicePolicy& on_device,
                                      const SequenceInfo& info, device::DeviceRun run,
                                      const std::string& where);

}  // namespace hae::cli
