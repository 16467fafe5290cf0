#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sim/policy.hpp"
#include "sim/trace.hpp"
#include "sim/weights.hpp"

namespace hae::cli {

/// What a command line calls the backends.
inline constexpr const char* kReferenceBackend = "reference";
inline constexpr const char* kDeviceBackend = "device";
inline constexpr const char* kCudaBackend = "cuda";

/// The Thrust system that this build's device backend runs on, `cpp`, `omp`, `cuda` or `hip`; empty where it
/// was built without one.
std::string device_system();

/// throws  DeviceError for a backend that this build lacks, or whose device is missing or unsuitable
void check_backend(const std::string& backend);

/// One sequence, where it is, and the policies to run over it.
struct DeviceTask {
  Sequence* sequence = nullptr;
  std::string where;
  std::vector<std::shared_ptr<const Policy>> policies;
};

/// Runs policies on the device, each over all sequences at once, and gives for each of them the policy that
/// drives the engine to the same evictions: what the device did is audited and measured like any stored log.
///
/// tasks    as many policies each; a policy that is a stored log already is given back
/// returns  [tasks][policies]
/// throws   what refuses a policy that the reference would refuse; ConfigError for a policy that does not run
///          on a device; DeviceError
std::vector<std::vector<std::shared_ptr<const Policy>>> run_on_device(std::span<const DeviceTask> tasks,
                                                                      NanRule nan);

}  // namespace hae::cli
