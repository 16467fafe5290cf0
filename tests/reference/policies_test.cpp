#include "reference/policies.hpp"

#include <gmock/gmock.h>

#include "reference/random.hpp"
#include "sim/match.hpp"
#include "testing/memory_trace.hpp"
#include "tests/support/policy_specs.hpp"

namespace hae {
namespace {

using testing::attention_trace;
using testing::brief;
using testing::MemoryTrace;
using testing::run;

/// Every token looks at itself and the first one.
MemoryTrace ten_tokens(Index prompt) {
  std::vector<std::vector<float>> rows = {{1.0f}};
  for (std::size_t i = 1; i < 10; ++i) {
    std::vector<float> row(i + 1, 0.0f);
    row.front() = 0.5f;
    row.back() = 0.5f;
    rows.push_back(row);
  }
  return attention_trace({rows}, prompt, std::vector<Index>(10, -1));
}

TEST(Window, KeepsSinksAndTheNewestAtOriginalPositions) {
  // One sink and three recent tokens of ten: {0, 7, 8, 9} stay.
  const RunResult result = run(ten_tokens(1), "window:sinks=1,recent=3");
  EXPECT_THAT(testing::residents(ten_tokens(1), result, 0, 0).back(), ::testing::ElementsAre(0, 7, 8, 9));
  EXPECT_EQ(run(ten_tokens(1), "window:sinks=1,budget=4").log, result.log);
}

TEST(Window, NeedsASize) {
  EXPECT_THROW(run(ten_tokens(5), "window"), ConfigError);
  EXPECT_THROW(reference::make_policy("window:budget=3"), ConfigError);  // fewer than its four sinks
}

TEST(Random, HasItsPublishedPriority) {
  EXPECT_EQ(reference::random_priority(1, 0, 0, 0), 0xe28195ddd9ee4956ULL);
}

TEST(Random, HasAPriorityForEachLayerLaneAndToken) {
  // SplitMix64, whose first output of seed 1234567 is known.
  const auto split_mix = [](std::uint64_t seed) {
    std::uint64_t z = seed + 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  };
  ASSERT_EQ(split_mix(1234567), 6457827717110365317ULL);
  EXPECT_EQ(reference::random_priority(7, 2, 3, 5),
            split_mix(split_mix(split_mix(split_mix(7) ^ 2) ^ 3) ^ 5));
}

TEST(Random, EvictsTheLowestPriorityOfThoseThatAreThere) {
  // Budget 3 of a prompt of 5, computed from the priorities: a kept token has a higher priority than any that
  // left by then.
  const MemoryTrace trace = ten_tokens(5);
  const RunResult result = run(trace, "random:budget=3,seed=7");
  const auto priority = [](Index token) { return reference::random_priority(7, 0, 0, token); };
  const auto after = testing::residents(trace, result, 0, 0);
  for (const LogEntry& entry : result.log.entries) {
    for (const Index kept : after[static_cast<std::size_t>(entry.step)]) {
      EXPECT_LT(priority(entry.token), priority(kept));
    }
    EXPECT_FALSE(entry.score.has_value());
  }
  EXPECT_EQ(result.log.entries.size(), 7u);
  EXPECT_NE(result.log, run(trace, "random:budget=3,seed=8").log);
}

TEST(H2O, KeepsHeavyHittersAndTheNewest) {
  // Budget 4, so 2 heavy and 2 recent; prompt of 4 with sums 2.5, .625, .5, .375; every later row gives token
  // 0 0.5, token 1 0.25 and itself 0.25. With 2 recent tokens, 2 and 3 go first and then each token as it
  // leaves the window.
  std::vector<std::vector<float>> rows = {
      {1.0f}, {0.5f, 0.5f}, {0.5f, 0.125f, 0.375f}, {0.5f, 0.0f, 0.125f, 0.375f}};
  for (std::size_t i = 4; i < 10; ++i) {
    std::vector<float> row(i + 1, 0.0f);
    row[0] = 0.5f;
    row[1] = 0.25f;
    row[i] = 0.25f;
    rows.push_back(row);
  }
  const MemoryTrace trace = attention_trace({rows}, 4, std::vector<Index>(10, -1));
  const RunResult h2o = run(trace, "h2o/layerwise:budget=4");
  EXPECT_THAT(testing::residents(trace, h2o, 0, 0).back(), ::testing::ElementsAre(0, 1, 8, 9));
  // Without recent tokens the cache freezes: a new token, at 0.25, is always the lowest.
  const RunResult frozen = run(trace, "h2o/layerwise:budget=4,recent=0");
  EXPECT_THAT(testing::residents(trace, frozen, 0, 0).back(), ::testing::ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(frozen.warnings, ::testing::Contains("0 of 6 generated tokens retained in 1 of 1 lanes"));
}

TEST(Policies, EveryNameMakesAPolicyOrSaysWhatItLacks) {
  for (const reference::PolicyInfo& info : reference::policies()) {
    EXPECT_FALSE(info.source.empty());
    EXPECT_FALSE(info.fidelity.empty());
    try {
      const auto policy = reference::make_policy(info.name);
      EXPECT_EQ(policy->spec(), info.name);
      EXPECT_EQ(policy->options().size(), info.options.size());
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("is required"));
    }
  }
}

TEST(Match, TakesTheNearestBudgetAndTheLowerOnATie) {
  // P = 4, six steps. First run: a window of 3 holds 4 at every attention: mean 4.
  //   greedy with l holds min(l, ..) + 1: from the second step on l + 1, so l = 3 gives 4 exactly.
  const MemoryTrace trace = ten_tokens(4);
  const RunResult first = run(trace, "window:sinks=0,recent=3");
  const auto greedy = reference::make_policy("greedy");
  const auto matched = match_budget(trace.info, first, greedy, {4}, MatchTarget::mean);
  testing::MemorySequence sequence(trace);
  const RunResult result = replay(sequence, {matched}, {}, "memory").front();
  EXPECT_EQ(result.limits[0].budget, 3);
  EXPECT_EQ(*count_tokens(trace.info, result).mean, 4.0);

  // A bin of 2: l = 3 holds 4, 5, 4, 5, 4, 5 (mean 4.5), l = 2 holds 3, 4, 3, 4, .. (3.5). Both are 0.5 away:
  // the lower.
  const auto bin = reference::make_policy("hae:dap=none,bin=2");
  const auto lower = match_budget(trace.info, first, bin, {4}, MatchTarget::mean);
  EXPECT_EQ(replay(sequence, {lower}, {}, "memory").front().limits[0].budget, 2);
}

TEST(Match, CanMatchThePeak) {
  // A bin of 2 with l = 3 peaks at 5; greedy peaks at l + 1, so l = 4.
  const MemoryTrace trace = ten_tokens(4);
  const RunResult first = run(trace, "hae:dap=none,budget=3,bin=2");
  const auto matched =
      match_budget(trace.info, first, reference::make_policy("greedy"), {4}, MatchTarget::peak);
  testing::MemorySequence sequence(trace);
  EXPECT_EQ(replay(sequence, {matched}, {}, "memory").front().limits[0].budget, 4);
}

TEST(Match, CountsWhatPruningLeavesInEachLayer) {
  // Two layers of 6 prompt tokens, of which pruning left 6 and 3, four steps. Goal: a window of 4 holds 5 at
  // every attention in both layers: mean 5.
  //   greedy l = 4: layer 0 holds 5, 5, 5, 5 = 20; layer 1 holds 4, 5, 5, 5 = 19; mean 39 / 8 = 4.875, 0.125
  //   away greedy l = 5: 24 and 4 + 5 + 6 + 6 = 21; mean 45 / 8 = 5.625
  std::vector<std::vector<float>> rows = {{1.0f}};
  for (std::size_t i = 1; i < 10; ++i) {
    rows.emplace_back(i + 1, 0.0f).back() = 1.0f;
  }
  const MemoryTrace trace = attention_trace({rows, rows}, 6, std::vector<Index>(10, -1));
  const RunResult first = run(trace, "window:sinks=0,recent=4");
  const auto matched =
      match_budget(trace.info, first, reference::make_policy("greedy"), {6, 3}, MatchTarget::mean);
  testing::MemorySequence sequence(trace);
  EXPECT_EQ(replay(sequence, {matched}, {}, "memory").front().limits[0].budget, 4);
}

TEST(Match, CountsOnThePromptBeingCutBeforeTheFirstStep) {
  // A prompt of 4, of which 2 stay; each of six steps sees those and its own token.
  const MemoryTrace trace = ten_tokens(4);
  for (const std::string spec : {"window:sinks=0", "random", "tova", "greedy"}) {
    const LaneSizes sizes = reference::make_policy(spec)->sizes(trace.info, 0, 2, 4).value();
    EXPECT_EQ(sizes.total, 18) << spec;
    EXPECT_EQ(sizes.peak, 3) << spec;
  }
}

TEST(Match, MayTakeABudgetOfProtectedTokensAlone) {
  // Two protected tokens each: a budget of 2 holds them and nothing else, one of 1 is impossible.
  const MemoryTrace trace = ten_tokens(4);
  for (const std::string spec :
       {"window:sinks=2", "greedy:sinks=1,recent=1", "hae:dap=none,bin=1,sinks=1,recent=1",
        "h2o/layerwise:recent=2", "h2o/flexgen:recent=2", "scissorhands:sinks=1,recent=1",
        "nacl:sinks=1,recent=1,random=0", "snapkv:window=2"}) {
    const auto policy = reference::make_policy(spec);
    EXPECT_TRUE(policy->sizes(trace.info, 0, 2, 4).has_value()) << spec;
    EXPECT_FALSE(policy->sizes(trace.info, 0, 1, 4).has_value()) << spec;
    EXPECT_EQ(run(trace, spec + ",budget=2").limits[0].budget, 2) << spec;
    EXPECT_THROW(run(trace, spec + ",budget=1"), ConfigError) << spec;
    EXPECT_EQ(run(trace, spec + ",budget=50%").limits[0].budget, 2) << spec;
    EXPECT_THROW(run(trace, spec + ",budget=25%"), ConfigError) << spec;
  }
}

TEST(Match, SaysWhenNoBudgetIsPossible) {
  const MemoryTrace trace = ten_tokens(4);
  const RunResult first = run(trace, "full");
  const auto greedy = reference::make_policy("greedy:sinks=20");
  EXPECT_THROW(match_budget(trace.info, first, greedy, {4}, MatchTarget::mean), ConfigError);
  const MemoryTrace no_steps = ten_tokens(10);
  EXPECT_THROW(match_budget(no_steps.info, run(no_steps, "full"), reference::make_policy("greedy"), {10},
                            MatchTarget::mean),
               ConfigError);
}

}  // namespace
}  // namespace hae
