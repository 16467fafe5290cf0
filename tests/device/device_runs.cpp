#include "tests/device/device_runs.hpp"

#include <algorithm>

#include "reference/policies.hpp"
#include "tests/support/policy_specs.hpp"

namespace hae::testing {
namespace {

std::string first_difference(const EvictionLog& reference, const EvictionLog& device) {
  const auto line = [](const EvictionLog& log, std::size_t i) {
    return i < log.entries.size() ? to_json_lines({{log.entries[i]}, {}}) : std::string("nothing\n");
  };
  for (std::size_t i = 0; i < std::max(reference.entries.size(), device.entries.size()); ++i) {
    if (line(reference, i) != line(device, i)) {
      return "entry " + std::to_string(i) + ": reference " + line(reference, i) + "device " + line(device, i);
    }
  }
  return reference.pending == device.pending ? "" : "the tokens pending at the end differ";
}

}  // namespace

std::vector<device::DeviceRun> device_runs(const std::vector<const MemoryTrace*>& traces,
                                           const std::string& spec, const device::Options& options) {
  const std::shared_ptr<const Policy> policy = reference::make_policy(spec);
  std::vector<MemorySequence> sequences;
  sequences.reserve(traces.size());
  std::vector<device::Job> jobs;
  for (const MemoryTrace* trace : traces) {
    (void)policy->begin(trace->info);  // refuses what is impossible, as a replay does
    jobs.push_back({&sequences.emplace_back(*trace), cli::device_policy(*policy), "memory"});
  }
  return device::replay(jobs, options);
}

std::string parity(const MemoryTrace& trace, const std::string& spec, const device::Options& options) {
  return parity(trace, spec, device_runs({&trace}, spec, options).front(), options);
}

std::string parity(const MemoryTrace& trace, const std::string& spec, device::DeviceRun run,
                   const device::Options& options) {
  const ReplayOptions replay_options{.nan = options.nan};
  const RunResult expected = testing::run_all(trace, {spec}, replay_options).front();
  if (const std::string difference = first_difference(expected.log, run.log); !difference.empty()) {
    return spec + ": " + difference;
  }
  const std::shared_ptr<const Policy> policy = reference::make_policy(spec);
  MemorySequence sequence(trace);
  const RunResult measured =
      replay(sequence, {cli::audited(*policy, trace.info, std::move(run), "the device")}, replay_options,
             "memory")
          .front();
  if (!same_results(expected, measured)) {
    return spec + ": the engine measures other figures of the device's log";
  }
  if (expected.limits != measured.limits) {
    return spec + ": other limits";
  }
  if (expected.warnings != measured.warnings) {
    std::string text = spec + ": other warnings: reference";
    for (const std::string& warning : expected.warnings) {
      text += " '" + warning + "'";
    }
    text += ", device";
    for (const std::string& warning : measured.warnings) {
      text += " '" + warning + "'";
    }
    return text;
  }
  return "";
}

}  // namespace hae::testing
