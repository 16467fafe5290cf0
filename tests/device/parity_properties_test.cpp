#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>

#include "testing/generators.hpp"
#include "tests/device/device_runs.hpp"
#include "tests/support/interesting.hpp"
#include "tests/support/policy_specs.hpp"

// Logs, scores and figures of the device are the reference's, bit for bit, on generated traces.

namespace hae {
namespace {

using testing::device_runs;
using testing::MemoryTrace;
using testing::parity;

/// A spec of a policy that runs on a device, with any option, or one of the general generator.
rc::Gen<std::string> device_specs(const SequenceInfo& info) {
  return rc::gen::exec([info] {
    const auto known = cli::device_policies();
    while (true) {
      const Index budget = *rc::gen::inRange<Index>(1, info.tokens + 1);
      const std::string snapkv = "snapkv:budget=" + std::to_string(budget) +
                                 ",window=" + std::to_string(*rc::gen::inRange<Index>(1, budget + 1)) +
                                 ",kernel=" + *rc::gen::element<std::string>("1", "3", "5") +
                                 ",pool=" + *rc::gen::element<std::string>("mean", "max") +
                                 ",group=" + *rc::gen::element<std::string>("mean", "max", "sum");
      const std::string spec = *rc::gen::inRange(0, 10) == 0 ? snapkv : *testing::policy_specs(info);
      if (std::ranges::find(known, spec.substr(0, spec.find(':'))) != known.end()) {
        return spec;
      }
    }
  });
}

/// Whether anything was evicted; fails the case when the backends differ.
bool check(const MemoryTrace& trace, const std::string& spec) {
  const std::optional<RunResult> expected = testing::possible_run(trace, spec);
  if (!expected) {
    EXPECT_THROW((void)device_runs({&trace}, spec), ConfigError);
    return false;
  }
  const std::string difference = parity(trace, spec);
  RC_LOG(difference);
  RC_ASSERT(difference.empty());
  return !expected->log.entries.empty();
}

TEST(ParityProperties, OfRecordedAttention) {
  testing::check_interesting("logs of recorded attention", 0.5, [] {
    const MemoryTrace trace = *testing::attention_traces({.allow_masked = false});
    return check(trace, *device_specs(trace.info));
  });
}

TEST(ParityProperties, OfQueriesAndKeys) {
  testing::check_interesting("logs of queries and keys", 0.5, [] {
    const MemoryTrace trace = *testing::qkv_traces();
    return check(trace, *device_specs(trace.info));
  });
}

TEST(ParityProperties, OfRowsThatAttendToNothing) {
  testing::check_interesting("logs with masked rows", 0.5, [] {
    const MemoryTrace trace = *testing::attention_traces({});
    return check(trace, *device_specs(trace.info));
  });
}

TEST(ParityProperties, OfDyadicWeightsWithManyTies) {
  testing::check_interesting("logs of dyadic weights", 0.5, [] {
    const MemoryTrace trace = *testing::attention_traces({.prunable = true, .dyadic = true});
    return check(trace, *device_specs(trace.info));
  });
}

}  // namespace
}  // namespace hae
