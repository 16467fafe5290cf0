#include "sim/cli/certification.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
// RapidCheck needs GoogleTest first.
#include <rapidcheck/gtest.h>

#include "testing/generators.hpp"
#include "testing/memory_trace.hpp"
#include "tests/support/interesting.hpp"
#include "tests/support/policy_specs.hpp"

// Certificates of generated traces: no proved claim fails, whatever the trace and the policy.

namespace hae::cli {
namespace {

using testing::MemoryTrace;

class MemorySource final : public TraceSource {
 public:
  explicit MemorySource(std::vector<MemoryTrace> traces) : traces_(std::move(traces)) {}
  [[nodiscard]] Index sequences() const override { return std::ssize(traces_); }
  [[nodiscard]] std::unique_ptr<Sequence> open(Index index) override {
    return std::make_unique<testing::MemorySequence>(traces_[at(index)]);
  }
  [[nodiscard]] std::string name() const override { return "memory"; }

 private:
  std::vector<MemoryTrace> traces_;
};

Json certified(std::vector<MemoryTrace> traces, const std::string& spec, double epsilon) {
  const auto count = std::ssize(traces);
  const auto source = std::make_shared<MemorySource>(std::move(traces));
  std::vector<SequenceSource> sources;
  for (Index i = 0; i < count; ++i) {
    sources.push_back({source, 0, i, i, ""});
  }
  ComparisonOptions options;
  options.threads = 1;
  return certification(sources, PolicySource(spec, false), {.epsilon = epsilon}, nullptr, options,
                       [](double) {});
}

/// Claims that apply and were looked at.
Index applied(const Json& result) {
  return std::ranges::count_if(result["claims"], [](const Json& claim) {
    return claim["applies"].get<bool>() && claim["cases"].get<Index>() > 0;
  });
}

TEST(Certification, NoProvedClaimFailsOnAnyTrace) {
  testing::check_interesting("certificates of any policy", 0.3, [] {
    const bool recomputed = *rc::gen::arbitrary<bool>();
    const MemoryTrace trace = recomputed ? *testing::qkv_traces() : *testing::attention_traces();
    const std::string spec = *testing::policy_specs(trace.info);
    RC_LOG() << spec;
    const std::optional<RunResult> run = testing::possible_run(trace, spec);
    if (!run || run->merges) {
      return false;
    }
    const Json result = certified({trace}, spec, 0.5);
    for (const Check& check : certificate_checks(result)) {
      RC_LOG() << check.message;
      RC_ASSERT(check.passed || check.name == kLossCheck);
    }
    return applied(result) >= 4;
  });
}

TEST(Certification, TheBinsClaimsHoldForAnyOptionsOfHae) {
  testing::check_interesting("certificates of hae", 0.4, [] {
    const MemoryTrace trace = *testing::attention_traces({.most_tokens = 24, .allow_decode_less = false});
    const auto pick = [](std::vector<std::string> texts) { return *rc::gen::elementOf(std::move(texts)); };
    const std::string lane =
        pick({"", ",lane=kv_head", ",lane=kv_head,group=max", ",lane=kv_head,group=sum"});
    const std::string spec =
        "hae:" + pick({"dap=none", "r=0.3,alpha=0.9", "dap=mass,eps=0.4", "r=0.3,alpha=0.9,effect=after"}) +
        ",budget=" + std::to_string(*rc::gen::inRange(3, 12)) +
        ",bin=" + std::to_string(*rc::gen::inRange(1, 6)) + ",sinks=" + pick({"0", "1"}) +
        ",recent=" + pick({"0", "1", "2"}) + ",score=" + pick({"sum", "mean"}) +
        ",scores=" + pick({"observed", "full"}) + lane;
    RC_LOG() << spec;
    const Json result = certified({trace}, spec, 0.5);
    Index about_the_bin = 0;
    for (const Json& claim : result["claims"]) {
      const bool is_proved = claim["status"] == "proved";
      RC_ASSERT(!is_proved || claim["verdict"] != "fails");
      about_the_bin +=
          claim["id"].get<std::string>().starts_with("G1.") && claim["verdict"] == "holds" ? 1 : 0;
    }
    return about_the_bin == 3;
  });
}

TEST(Certification, ALayerHeldToItsWindowHasNoBin) {
  // One layer sees two tokens: whatever the budget, it holds these, and nothing is marked.
  MemoryTrace trace = testing::attention_trace({{{{1.0f},
                                                  {0.5f, 0.5f},
                                                  {0.0f, 0.5f, 0.5f},
                                                  {0.0f, 0.0f, 0.25f, 0.75f},
                                                  {0.0f, 0.0f, 0.0f, 0.5f, 0.5f}}}},
                                               3, {-1, -1, -1, -1, -1});
  trace.info.masks[0].window = 2;
  const Json result = certified({trace}, "hae:dap=none,budget=3,bin=2", 0.5);
  for (const Json& claim : result["claims"]) {
    if (claim["id"].get<std::string>().starts_with("G")) {
      EXPECT_FALSE(claim["applies"].get<bool>()) << claim;
    }
  }
  EXPECT_EQ(result["loss"]["measured"], 0.0);
}

TEST(Certification, AProvedClaimThatFailsIsACheckThatFails) {
  const MemoryTrace trace =
      testing::attention_trace({{{{1.0f}, {0.5f, 0.5f}, {0.25f, 0.25f, 0.5f}}}}, 2, {-1, -1, -1});
  Json result = certified({trace}, "full", 0.5);
  for (Json& claim : result["claims"]) {
    claim["applies"] = true;
    claim["verdict"] = claim["id"] == "R2" || claim["id"] == "T2.1" ? "fails" : "holds";
  }
  std::vector<std::string> failed;
  for (const Check& check : certificate_checks(result)) {
    if (!check.passed && check.name != kLossCheck) {
      failed.push_back(check.name);
    }
  }
  EXPECT_EQ(failed, std::vector<std::string>{"claim R2"});  // T2.1 is refuted, so it may
}

}  // namespace
}  // namespace hae::cli
