#include "sim/replay.hpp"

#include <gmock/gmock.h>

#include <limits>

#include "reference/policies.hpp"
#include "tests/support/memory_trace.hpp"

// The engine: order of a step, the contract it enforces, what it refuses. Policies are tested in tests/reference.

namespace hae {
namespace {

using testing::attention_trace;
using testing::brief;
using testing::run;
using ::testing::HasSubstr;

/// Two tokens of prompt, three decode steps, every row uniform.
testing::MemoryTrace uniform_trace(Index layers = 1) {
  const std::vector<std::vector<float>> rows = {
      {1.0f}, {0.5f, 0.5f}, {0.25f, 0.5f, 0.25f}, {0.25f, 0.25f, 0.25f, 0.25f}, {0.25f, 0.25f, 0.25f, 0.125f, 0.125f}};
  return attention_trace(std::vector(static_cast<std::size_t>(layers), rows), 2, {-1, -1, -1, -1, -1});
}

/// A policy that proposes one fixed decision at a step of a layer.
class Scripted final : public Policy {
 public:
  Scripted(Index step, Decision decision, Limits limits) : step_(step), decision_(std::move(decision)), limits_(limits) {}

  [[nodiscard]] std::string spec() const override { return "scripted"; }
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> options() const override { return {}; }
  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override { return {}; }

  [[nodiscard]] std::unique_ptr<Run> begin(const SequenceInfo& /*info*/) const override {
    class Decode final : public LayerDecode {
     public:
      explicit Decode(const Scripted& policy) : policy_(policy) {}
      Decision step(const Rows& /*row*/, const LayerCache& /*cache*/) override {
        return ++step_ == policy_.step_ ? policy_.decision_ : Decision{};
      }

     private:
      const Scripted& policy_;
      Index step_ = 0;
    };
    class ScriptedRun final : public Run {
     public:
      explicit ScriptedRun(const Scripted& policy) : policy_(policy) {}
      Decision prune(Index layer, const LayerCache& /*cache*/) override {
        return layer == 0 && policy_.step_ == 0 ? policy_.decision_ : Decision{};
      }
      std::unique_ptr<LayerDecode> decode(Index /*layer*/) override { return std::make_unique<Decode>(policy_); }
      [[nodiscard]] Limits limits(Index /*layer*/) const override { return policy_.limits_; }

     private:
      const Scripted& policy_;
    };
    return std::make_unique<ScriptedRun>(*this);
  }

 private:
  Index step_;
  Decision decision_;
  Limits limits_;
};

RunResult run_scripted(const testing::MemoryTrace& trace, Index step, Decision decision, Limits limits = {}) {
  testing::MemorySequence sequence(trace);
  return replay(sequence, {std::make_shared<Scripted>(step, std::move(decision), limits)}, {}, "memory").front();
}

Decision evicting(std::vector<Evict> evict) { return {std::move(evict), {}, Effect::within, {}}; }

TEST(Engine, RefusesToEvictWhatIsNotResident) {
  const testing::MemoryTrace trace = uniform_trace();
  EXPECT_THROW(run_scripted(trace, 1, evicting({{0, 0, 3, {}}})), ContractViolation);   // not there yet
  EXPECT_THROW(run_scripted(trace, 1, evicting({{0, 0, -1, {}}})), ContractViolation);  // no token
  EXPECT_THROW(run_scripted(trace, 1, evicting({{0, 0, 1, {}}, {0, 0, 1, {}}})), ContractViolation);  // twice
  EXPECT_THROW(run_scripted(trace, 1, evicting({{0, 1, 1, {}}})), ContractViolation);   // no such lane
  EXPECT_NO_THROW(run_scripted(trace, 1, evicting({{0, 0, 2, {}}})));
}

TEST(Engine, RefusesToTouchWhatThePolicyDeclaredProtected) {
  const testing::MemoryTrace trace = uniform_trace();
  EXPECT_THROW(run_scripted(trace, 1, evicting({{0, 0, 0, {}}}), {.sinks = 1}), ContractViolation);
  EXPECT_THROW(run_scripted(trace, 0, evicting({{0, Evict::kEveryLane, 0, {}}}), {.sinks = 1}), ContractViolation);
  // The newest two of {0, 1, 2} are 1 and 2.
  EXPECT_THROW(run_scripted(trace, 1, evicting({{0, 0, 1, {}}}), {.recent = 2}), ContractViolation);
  EXPECT_NO_THROW(run_scripted(trace, 1, evicting({{0, 0, 0, {}}}), {.recent = 2}));
  const Decision marks{{}, {{0, 1}}, Effect::within, {}};
  EXPECT_THROW(run_scripted(trace, 1, marks, {.recent = 2}), ContractViolation);
}

TEST(Engine, RefusesMoreResidentsThanThePolicyPromised) {
  const testing::MemoryTrace trace = uniform_trace();
  EXPECT_THROW(run_scripted(trace, 9, {}, {.capacity = 4}), ContractViolation);
  EXPECT_NO_THROW(run_scripted(trace, 9, {}, {.capacity = 5}));
}

TEST(Engine, PruningBroadcastsWithinLaterLayersAndAfterTheFirst) {
  const testing::MemoryTrace trace = uniform_trace(2);
  const Decision within = evicting({{0, Evict::kEveryLane, 0, 0.5}, {1, Evict::kEveryLane, 0, 0.5}});
  EXPECT_EQ(brief(run_scripted(trace, 0, within).log), "0/0/-1/0 0/1/-1/0w");
  Decision after = within;
  after.effect = Effect::after;
  EXPECT_EQ(brief(run_scripted(trace, 0, after).log), "0/0/-1/0 0/1/-1/0");
}

TEST(Engine, ATokenEvictedWithinGivesNoRowAndNoKeyThere) {
  const testing::MemoryTrace trace = uniform_trace(2);
  RunResult result = run_scripted(trace, 0, evicting({{1, Evict::kEveryLane, 0, {}}}));
  // Row 0 is not in the population; row 1 = (0.5, 0.5) misses token 0.
  EXPECT_TRUE(std::isnan(result.prefill.at(Metric::missed_mass, 1, 0, 0)));
  EXPECT_EQ(result.prefill.at(Metric::missed_mass, 1, 0, 1), 0.5);
  EXPECT_TRUE(std::isnan(result.prefill.at(Metric::missed_mass, 0, 0, 1)));
  EXPECT_EQ(result.prefill_tokens, 2 + 1);
}

TEST(Engine, NamesThePlaceOfANotFiniteNumber) {
  testing::MemoryTrace trace = uniform_trace();
  trace.attention[0][2 * 5 + 1] = std::numeric_limits<float>::quiet_NaN();
  try {
    run(trace, "full");
    FAIL() << "expected a TraceError";
  } catch (const TraceError& error) {
    EXPECT_THAT(error.what(), HasSubstr("sequence 'by hand', layer 0, head 0, row 2: the probability of key 1"));
  }
  ReplayOptions lowest;
  lowest.nan = NanRule::lowest;
  const RunResult result = run(trace, "full", lowest);
  EXPECT_EQ(result.lowered_weights, 1);
}

TEST(Engine, RefusesRowsThatAreNotProbabilities) {
  const auto error_of = [](std::size_t element, float value) -> std::string {
    testing::MemoryTrace trace = uniform_trace();
    trace.attention[0][element] = value;
    try {
      run(trace, "full");
    } catch (const TraceError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(error_of(2 * 5 + 0, 0.5f), HasSubstr("row 2: the row sums to 1.25"));
  EXPECT_THAT(error_of(2 * 5 + 0, -0.25f), HasSubstr("expected 0 or more"));
  EXPECT_THAT(error_of(0 * 5 + 1, 0.25f), HasSubstr("the mask forbids it"));
}

TEST(Engine, RefusesATraceThatLacksNeededRowsBeforeAnythingRuns) {
  testing::MemoryTrace trace = uniform_trace();
  trace.info.prompt_rows = {1};
  try {
    run(trace, "greedy");
    FAIL() << "expected a NeedsError";
  } catch (const NeedsError& error) {
    EXPECT_THAT(error.what(), HasSubstr("lacks prompt row 0, which policy 'greedy' needs in layer 0"));
  }
  EXPECT_NO_THROW(run(trace, "window:sinks=0,recent=2"));
}

TEST(Engine, SaysWhenNoGeneratedTokenIsRetained) {
  // Sums favour the prompt: with recent = 0 every generated token is the lowest and goes at once.
  const testing::MemoryTrace trace = attention_trace(
      {{{{1.0f}, {0.5f, 0.5f}, {0.5f, 0.5f, 0.0f}, {0.5f, 0.5f, 0.0f, 0.0f}}}}, 2, {-1, -1, -1, -1});
  const RunResult result = run(trace, "greedy:budget=2,recent=0");
  EXPECT_EQ(brief(result.log), "1/0/-1/2 2/0/-1/3");
  EXPECT_THAT(result.warnings, ::testing::Contains("0 of 2 generated tokens retained in 1 of 1 lanes"));
}

}  // namespace
}  // namespace hae
