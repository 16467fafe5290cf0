#include "sim/cli/policy_source.hpp"

#include <algorithm>
#include <array>

#include "sim/logged_policy.hpp"

namespace hae::cli {
namespace {

constexpr std::string_view kLogName = "log";

constexpr std::array kLogOptions = {
    reference::OptionInfo{"path", "-", "a file that hae replay --out or hae compare --out wrote",
                          "the stored runs; required"},
    reference::OptionInfo{"index", "0", "a whole number of 0 or more",
                          "which of the file's policies, in the order in which they were run"},
};

const reference::PolicyInfo kLog = {
    kLogName,
    "evicts what a stored log says",
    "any run that was kept with --out",
    "Exact: the same evictions, marks and scores, measured by the same loop. A log is matched to a sequence "
    "by the trace's SHA-256 and the sequence's name.",
    kLogOptions,
    nullptr,  // There is no log for all sequences: see PolicySource.
};

/// Specs of the policies in a file, in order of appearance.
std::vector<std::string> specs_of(const traces::StoredRuns& stored) {
  std::vector<std::string> specs;
  for (const traces::StoredRun& run : stored.runs) {
    if (std::ranges::find(specs, run.identity.policy) == specs.end()) {
      specs.push_back(run.identity.policy);
    }
  }
  return specs;
}

}  // namespace

std::vector<reference::PolicyInfo> known_policies() {
  const auto table = reference::policies();
  std::vector<reference::PolicyInfo> all(table.begin(), table.end());
  all.push_back(kLog);
  return all;
}

PolicySource::PolicySource(const std::string& spec, bool lock) {
  if (reference::Options::name_of(spec) != kLogName) {
    policy_ = reference::make_policy(spec);
    spec_ = policy_->spec();
    return;
  }
  const reference::Options options(spec, kLogOptions);
  if (!options.given("path")) {
    options.fail("path");
  }
  spec_ = options.canonical();
  log_path_ = options.text("path");
  stored_ = traces::read_runs(*log_path_, lock);
  const std::vector<std::string> specs = specs_of(stored_);
  const auto index = static_cast<std::size_t>(options.count("index", 0));
  if (index >= specs.size()) {
    options.fail("index", "is " + options.text("index") + ", but " + *log_path_ + " holds runs of " +
                              std::to_string(specs.size()) + " policies; count from 0");
  }
  std::erase_if(stored_.runs,
                [&](const traces::StoredRun& run) { return run.identity.policy != specs[index]; });
}

std::shared_ptr<const Policy> PolicySource::of(const SequenceInfo& sequence,
                                               const std::string& trace_sha256) const {
  if (policy_) {
    return policy_;
  }
  for (const traces::StoredRun& run : stored_.runs) {
    const traces::StoredTrace& trace = stored_.traces[static_cast<std::size_t>(run.identity.trace)];
    if (trace.sha256 == trace_sha256 && run.identity.sequence == sequence.name) {
      auto options = run.identity.options;
      options.emplace_back("log", run.identity.policy);
      return logged_policy({spec_, std::move(options), *log_path_, run.lanes, run.log});
    }
  }
  if (trace_sha256.empty()) {
    throw TraceError(*log_path_ + ": its runs belong to trace files, but sequence '" + sequence.name +
                     "' is in memory; write it to a file and replay that");
  }
  throw TraceError(*log_path_ + ": holds no run of sequence '" + sequence.name +
                   "' of a trace with SHA-256 " + trace_sha256 +
                   "; name the trace that the runs were made from");
}

void check_distinct(const std::vector<PolicySource>& policies) {
  for (const PolicySource& policy : policies) {
    if (std::ranges::count(policies, policy.spec(), &PolicySource::spec) > 1) {
      throw ConfigError("policy '" + policy.spec() + "' is given twice; give it once");
    }
  }
}

std::vector<PolicySource> policy_sources(const std::vector<std::string>& specs, bool lock) {
  std::vector<PolicySource> sources;
  for (const std::string& spec : specs) {
    sources.emplace_back(spec, lock);
  }
  check_distinct(sources);
  return sources;
}

}  // namespace hae::cli
