#include "sim/cli/device_backend.hpp"

#include <mutex>

#include "sim/cli/device_policy.hpp"
#include "sim/needs.hpp"

namespace hae::cli {
namespace {

using Policies = std::vector<std::shared_ptr<const Policy>>;

/// Runs the tasks' policies of one place in their lists; replaces them in `executed`.
void run_policy(std::span<const DeviceTask> tasks, std::size_t place, NanRule nan,
                std::vector<Policies>& executed) {
  std::vector<device::Job> jobs;
  for (const DeviceTask& task : tasks) {
    const Policy& policy = *task.policies[place];
    const SequenceInfo& info = task.sequence->info();
    check_needs(info, policy, true, task.where + ": sequence '" + info.name + "'");
    (void)policy.begin(info);  // refuses options that are impossible for the sequence
    jobs.push_back({task.sequence, device_policy(policy), task.where});
  }
  static std::mutex one_at_a_time;  // they would share the device's memory
  std::vector<device::DeviceRun> runs;
  {
    const std::scoped_lock lock(one_at_a_time);
    runs = device::replay(jobs, {.nan = nan});
  }
  for (std::size_t t = 0; t < tasks.size(); ++t) {
    executed[t].push_back(audited(*tasks[t].policies[place], tasks[t].sequence->info(), std::move(runs[t]),
                                  tasks[t].where + ": the device's log"));
  }
}

}  // namespace

std::string device_system() {
  return device::system_name();
}

void check_backend(const std::string& backend) {
  if (backend == kCudaBackend && device_system() != kCudaBackend) {
    throw DeviceError("--backend cuda: built without CUDA (the device backend of this build is Thrust's " +
                      device_system() + "); use --backend device or reference");
  }
  if (backend != kReferenceBackend) {
    device::check_device();
  }
}

std::vector<Policies> run_on_device(std::span<const DeviceTask> tasks, NanRule nan) {
  std::vector<Policies> executed(tasks.size());
  for (std::size_t place = 0; !tasks.empty() && place < tasks.front().policies.size(); ++place) {
    if (tasks.front().policies[place]->spec().starts_with("log:")) {
      for (std::size_t t = 0; t < tasks.size(); ++t) {
        executed[t].push_back(tasks[t].policies[place]);
      }
    } else {
      run_policy(tasks, place, nan, executed);
    }
  }
  return executed;
}

}  // namespace hae::cli
