#include "sim/replay.hpp"

#include <gmock/gmock.h>

#include <limits>

#include "reference/policies.hpp"
#include "testing/memory_trace.hpp"
#include "tests/support/policy_specs.hpp"

// The engine: order of a step, the contract it enforces, what it refuses. Policies are tested in
// tests/reference.

namespace hae {
namespace {

using testing::attention_trace;
using testing::brief;
using ::testing::HasSubstr;
using testing::run;

/// Two tokens of prompt, three decode steps, every row uniform.
testing::MemoryTrace uniform_trace(Index layers = 1) {
  const std::vector<std::vector<float>> rows = {{1.0f},
                                                {0.5f, 0.5f},
                                                {0.25f, 0.5f, 0.25f},
                                                {0.25f, 0.25f, 0.25f, 0.25f},
                                                {0.25f, 0.25f, 0.25f, 0.125f, 0.125f}};
  return attention_trace(std::vector(static_cast<std::size_t>(layers), rows), 2, {-1, -1, -1, -1, -1});
}

/// A policy that proposes one fixed decision: at a step of layer 0's decode, or at one moment of the prefill
/// of layer 0.
class Scripted final : public Policy {
 public:
  enum class When { step, prune, fit, balance };

  Scripted(When when, Index step, Decision decision, Limits limits)
      : when_(when), step_(step), decision_(std::move(decision)), limits_(limits) {}

  [[nodiscard]] std::string spec() const override { return "scripted"; }
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> options() const override { return {}; }
  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override { return {}; }
  [[nodiscard]] std::unique_ptr<Run> begin(const SequenceInfo& /*info*/) const override {
    return std::make_unique<ScriptedRun>(*this);
  }

 private:
  class Decode final : public LayerDecode {
   public:
    explicit Decode(const Scripted& policy) : policy_(policy) {}
    Decision step(const Rows& row, const LayerCache& /*cache*/) override {
      const bool now = policy_.when_ == When::step && row.layer() == 0 && ++step_ == policy_.step_;
      return now ? policy_.decision_ : Decision{};
    }

   private:
    const Scripted& policy_;
    Index step_ = 0;
  };

  class ScriptedRun final : public Run {
   public:
    explicit ScriptedRun(const Scripted& policy) : policy_(policy) {}
    Decision prune(Index layer, const LayerCache& /*cache*/) override { return at(When::prune, layer); }
    Decision fit(Index layer, const LayerCache& /*cache*/) override { return at(When::fit, layer); }
    Decision balance(const std::vector<LayerCache>& /*caches*/) override { return at(When::balance, 0); }
    std::unique_ptr<LayerDecode> decode(Index /*layer*/) override {
      return std::make_unique<Decode>(policy_);
    }
    [[nodiscard]] Limits limits(Index /*layer*/, Index /*lane*/) const override { return policy_.limits_; }

   private:
    [[nodiscard]] Decision at(When moment, Index layer) const {
      return policy_.when_ == moment && layer == 0 ? policy_.decision_ : Decision{};
    }
    const Scripted& policy_;
  };

  When when_;
  Index step_;
  Decision decision_;
  Limits limits_;
};

RunResult run_scripted(const testing::MemoryTrace& trace, Scripted::When when, Index step, Decision decision,
                       Limits limits = {}) {
  testing::MemorySequence sequence(trace);
  const auto policy = std::make_shared<Scripted>(when, step, std::move(decision), limits);
  return replay(sequence, {policy}, {}, "memory").front();
}

/// At decode step `step`, or in the prune moment for step 0.
RunResult run_scripted(const testing::MemoryTrace& trace, Index step, Decision decision, Limits limits = {}) {
  const auto when = step == 0 ? Scripted::When::prune : Scripted::When::step;
  return run_scripted(trace, when, step, std::move(decision), limits);
}

Decision evicting(std::vector<Evict> evict) {
  return {std::move(evict), {}, Effect::within, {}};
}

TEST(Engine, RefusesToEvictWhatIsNotResident) {
  const testing::MemoryTrace trace = uniform_trace();
  EXPECT_THROW(run_scripted(trace, 1, evicting({{0, 0, 3, {}}})), ContractViolation);   // not there yet
  EXPECT_THROW(run_scripted(trace, 1, evicting({{0, 0, -1, {}}})), ContractViolation);  // no token
  EXPECT_THROW(run_scripted(trace, 1, evicting({{0, 0, 1, {}}, {0, 0, 1, {}}})), ContractViolation);  // twice
  EXPECT_THROW(run_scripted(trace, 1, evicting({{0, 1, 1, {}}})), ContractViolation);  // no such lane
  EXPECT_NO_THROW(run_scripted(trace, 1, evicting({{0, 0, 2, {}}})));
}

TEST(Engine, RefusesToTouchWhatThePolicyDeclaredProtected) {
  const testing::MemoryTrace trace = uniform_trace();
  EXPECT_THROW(run_scripted(trace, 1, evicting({{0, 0, 0, {}}}), {.sinks = 1}), ContractViolation);
  EXPECT_THROW(run_scripted(trace, 0, evicting({{0, Evict::kEveryLane, 0, {}}}), {.sinks = 1}),
               ContractViolation);
  // The newest two of {0, 1, 2} are 1 and 2.
  EXPECT_THROW(run_scripted(trace, 1, evicting({{0, 0, 1, {}}}), {.recent = 2}), ContractViolation);
  EXPECT_NO_THROW(run_scripted(trace, 1, evicting({{0, 0, 0, {}}}), {.recent = 2}));
  const Decision marks{{}, {{0, 1}}, Effect::within, {}};
  EXPECT_THROW(run_scripted(trace, 1, marks, {.recent = 2}), ContractViolation);
}

TEST(Engine, RefusesMarksThatMakeNoSense) {
  const testing::MemoryTrace trace = uniform_trace();
  const auto marking = [](std::vector<Mark> marks) {
    return Decision{{}, std::move(marks), Effect::within, {}};
  };
  EXPECT_THROW(run_scripted(trace, 1, marking({{0, 4}})), ContractViolation);          // not there yet
  EXPECT_THROW(run_scripted(trace, 1, marking({{0, 1}, {0, 1}})), ContractViolation);  // twice
  EXPECT_THROW(run_scripted(trace, 1, marking({{0, 0}}), {.sinks = 1}), ContractViolation);
  EXPECT_THROW(run_scripted(trace, 1, marking({{0, 0}, {0, 1}}), {.bin = 1}), ContractViolation);
  const RunResult pending = run_scripted(trace, 1, marking({{0, 1}}));
  EXPECT_EQ(pending.log.pending, (std::vector<PendingEntry>{{0, kLayerLane, 1, 1}}));
  // A marked token may be evicted in the same decision; the log says since when it was pending.
  const Decision both{{{0, 0, 1, 0.5}}, {{0, 1}}, Effect::within, {}};
  EXPECT_EQ(brief(run_scripted(trace, 1, both).log), "1/0/-1/1@1");
}

TEST(Engine, FitStaysInItsLayerAndSparesRecentTokens) {
  using When = Scripted::When;
  const testing::MemoryTrace trace = uniform_trace(2);
  EXPECT_THROW(run_scripted(trace, When::fit, 0, evicting({{1, Evict::kEveryLane, 0, {}}})),
               ContractViolation);
  EXPECT_THROW(run_scripted(trace, When::fit, 0, evicting({{0, 0, 1, {}}}), {.recent = 1}),
               ContractViolation);
  EXPECT_EQ(brief(run_scripted(trace, When::fit, 0, evicting({{0, 0, 0, {}}}), {.recent = 1}).log),
            "0/0/-1/0");
}

TEST(Engine, BalanceReachesEveryLayerAndPruningMayTakeRecentTokens) {
  using When = Scripted::When;
  const testing::MemoryTrace trace = uniform_trace(2);
  EXPECT_EQ(
      brief(
          run_scripted(trace, When::balance, 0, evicting({{0, 0, 0, {}}, {1, 0, 0, {}}}), {.recent = 1}).log),
      "0/0/-1/0 0/1/-1/0");
  EXPECT_THROW(run_scripted(trace, When::balance, 0, evicting({{1, 0, 1, {}}}), {.recent = 1}),
               ContractViolation);
  EXPECT_EQ(brief(run_scripted(trace, When::prune, 0, evicting({{0, 0, 1, {}}}), {.recent = 1}).log),
            "0/0/-1/1");
}

TEST(Engine, RefusesMoreResidentsThanThePolicyPromised) {
  const testing::MemoryTrace trace = uniform_trace();
  EXPECT_THROW(run_scripted(trace, 9, {}, {.capacity = 4}), ContractViolation);
  EXPECT_NO_THROW(run_scripted(trace, 9, {}, {.capacity = 5}));
  EXPECT_THROW(run_scripted(trace, 9, {}, {.capacity = 1}), ContractViolation);  // already after the prefill
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
    EXPECT_THAT(error.what(),
                HasSubstr("sequence 'by hand', layer 0, head 0, row 2: the probability of key 1"));
  }
  ReplayOptions lowest;
  lowest.nan = NanRule::lowest;
  const RunResult result = run(trace, "full", lowest);
  EXPECT_EQ(result.lowered_weights, 1);
}

TEST(Engine, NamesTheFirstWrongRowWhateverTheSizeOfABlock) {
  // Two heads of five tokens, prompt 3, each token attending to itself: head 0 is wrong in row 2, head 1 in
  // row 1.
  std::vector<std::vector<float>> rows(5);
  for (std::size_t i = 0; i < 5; ++i) {
    rows[i].resize(i + 1);
    rows[i][i] = 1.0f;
  }
  testing::MemoryTrace trace = attention_trace({{rows, rows}}, 1, 3, {-1, -1, -1, -1, -1});
  trace.attention[0][2 * 5 + 0] = std::numeric_limits<float>::infinity();
  trace.attention[0][5 * 5 + 1 * 5 + 1] = -std::numeric_limits<float>::quiet_NaN();
  for (const Index block_rows : {0, 1, 2, 3}) {
    ReplayOptions options;
    options.block_rows = block_rows;
    try {
      run(trace, "full", options);
      FAIL() << "expected a TraceError";
    } catch (const TraceError& error) {
      EXPECT_THAT(error.what(), HasSubstr("layer 0, head 1, row 1: the probability of key 1 is NaN,"));
    }
  }
}

TEST(Engine, RefusesAValueThatIsNotFiniteWhateverIsCompared) {
  // Without decode steps and without evictions nothing would be measured with it.
  testing::MemoryTrace trace = attention_trace({{{1.0f}, {0.0f, 1.0f}}}, 2, {-1, -1});
  trace.info.has_values = true;
  trace.info.head_dim = 1;
  trace.values = {{1.0f, std::numeric_limits<float>::infinity()}};
  EXPECT_THROW(run(trace, "full"), TraceError);
  ReplayOptions lowest;
  lowest.nan = NanRule::lowest;
  EXPECT_THROW(run(trace, "full", lowest), TraceError);
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
  // Pruning alone needs the rows of prompt text only: token 0 belongs to a picture, row 1 is stored.
  trace.info.image[0] = 0;
  EXPECT_EQ(brief(run(trace, "hae:ddes=none,r=2,alpha=2").log), "0/0/-1/0");
}

TEST(Engine, LowersLogitsThatAreNotFinite) {
  // One head of dimension 1, three tokens, queries 1, keys (0, inf, 0): row 2 without key 1 is (1, 0, 1) / 2.
  testing::MemoryTrace trace = attention_trace({{{1.0f}}}, 2, {-1, -1, -1});
  trace.info.payload = Payload::qkv;
  trace.info.head_dim = 1;
  trace.queries = {{1.0f, 1.0f, 1.0f}};
  trace.keys = {{0.0f, std::numeric_limits<float>::infinity(), 0.0f}};
  EXPECT_THROW(run(trace, "full"), TraceError);
  ReplayOptions lowest;
  lowest.nan = NanRule::lowest;
  const RunResult result = run(trace, "greedy:budget=1,recent=0", lowest);
  EXPECT_EQ(result.lowered_weights, 2);  // rows 1 and 2 see key 1
  // Scores after the prompt: row 0 gives token 0 1, row 1 gives it 1 again and token 1 nothing: token 1 goes.
  EXPECT_EQ(brief(result.log), "0/0/-1/1 1/0/-1/2");
}

TEST(Engine, RefusesASequenceThatContradictsItself) {
  testing::MemoryTrace trace = uniform_trace();
  trace.info.image.pop_back();
  EXPECT_THROW(run(trace, "full"), TraceError);
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
