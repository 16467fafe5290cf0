#include "reference/recycle_bin.hpp"

#include <gmock/gmock.h>

#include "testing/memory_trace.hpp"
#include "tests/support/policy_specs.hpp"

// DDES by hand: two tokens of prompt, four decode steps, no picture.

namespace hae {
namespace {

using testing::attention_trace;
using testing::brief;
using ::testing::ElementsAre;
using testing::MemoryTrace;
using testing::run;

MemoryTrace six_tokens() {
  return attention_trace({{{1.0f},
                           {0.5f, 0.5f},
                           {0.25f, 0.25f, 0.5f},
                           {0.25f, 0.25f, 0.25f, 0.25f},
                           {0.5f, 0.125f, 0.125f, 0.125f, 0.125f},
                           {0.25f, 0.0f, 0.0f, 0.25f, 0.25f, 0.25f}}},
                         2, {-1, -1, -1, -1, -1, -1});
}

TEST(RecycleBin, MarksOneTokenAStepAndEmptiesAFullBin) {
  // l = 2, D = 2, recent = 1. Scores after the prompt: s0 = 1.5, s1 = 0.5.
  // step 1, row (.25 .25 .5): s = 1.75 .75 .5; unmarked 3 > 2; eligible {0, 1}: mark 1.
  // step 2, row (.25 .25 .25 .25): s = 2 1 .75 .25; unmarked {0, 2, 3}; eligible {0, 2}: mark 2; the bin is
  // full: 1 and 2 go
  //         with their scores of now, 1 and 0.75.
  // step 3, residents {0, 3, 4}: (.5 .125 .125) / .75; unmarked 3; eligible {0, 3}: mark 3.
  // step 4, residents {0, 3, 4, 5}: unmarked {0, 4, 5} = 3 > 2; eligible {0, 4}: s4 = .125/.75 + .25 = .416..
  // : mark 4; 3
  //         and 4 go.
  const RunResult result = run(six_tokens(), "hae:dap=none,budget=2,bin=2");
  EXPECT_EQ(brief(result.log), "2/0/-1/1@1 2/0/-1/2@2 4/0/-1/3@3 4/0/-1/4@4");
  EXPECT_EQ(result.log.entries[0].score, 1.0);
  EXPECT_EQ(result.log.entries[1].score, 0.75);
  EXPECT_TRUE(result.log.pending.empty());
}

TEST(RecycleBin, PendingTokensAreStillThereAtTheEnd) {
  // As above with D = 3: marks 1, 2 and at step 3 a third one, so the bin empties at step 3; step 4 marks one
  // more. step 3, residents {0..4}, row (.5 .125 .125 .125 .125): s0 = 2.5, s3 = .375, s4 = .125; unmarked
  // {0, 3, 4} = 3 > 2;
  //         eligible {0, 3}: mark 3; the bin {1, 2, 3} is full.
  // step 4, residents {0, 4, 5}: eligible {0, 4}: mark 4, which stays pending.
  const RunResult result = run(six_tokens(), "hae:dap=none,budget=2,bin=3");
  EXPECT_EQ(brief(result.log), "3/0/-1/1@1 3/0/-1/2@2 3/0/-1/3@3");
  EXPECT_THAT(result.log.pending, ElementsAre(PendingEntry{0, kLayerLane, 4, 4}));
  EXPECT_THAT(result.attention_tokens, ElementsAre(3, 4, 5, 3));
  // Two marked beside the budget: after step 2, and never more after a step.
  EXPECT_EQ(result.limits[0].capacity, 4);
}

TEST(RecycleBin, BatchEvictsTheDLowestBeforeItsWindow) {
  // l = 2, D = 2: recent = min(D, l) = 2. At step 2 four tokens are resident; eligible {0, 1} both go, never
  // marked. step 3: residents {2, 3, 4}; step 4: {2, 3, 4, 5} = l + D: eligible {2, 3} go.
  const RunResult result = run(six_tokens(), "hae:dap=none,ddes=batch,budget=2,bin=2");
  EXPECT_EQ(brief(result.log), "2/0/-1/0 2/0/-1/1 4/0/-1/2 4/0/-1/3");
}

TEST(RecycleBin, BatchGoesByTheScoresOfTheStep) {
  // l = 3, D = 1: recent = min(D, l) = 1. After the prompt s = 1.75 .75 .5. Step 1 makes l + D tokens and
  // adds 0 0 .5: of the eligible {0, 1, 2} no longer 2 is the lowest but 1.
  const MemoryTrace trace = attention_trace(
      {{{1.0f}, {0.5f, 0.5f}, {0.25f, 0.25f, 0.5f}, {0.0f, 0.0f, 0.5f, 0.5f}}}, 3, {-1, -1, -1, -1});
  const RunResult result = run(trace, "hae:dap=none,ddes=batch,budget=3,bin=1");
  EXPECT_EQ(brief(result.log), "1/0/-1/1");
  EXPECT_EQ(result.log.entries[0].score, 0.75);
}

TEST(RecycleBin, FitsThePromptToItsBudgetFirst) {
  // l = 1, sinks 0, recent 1: token 1 is protected as the newest, so token 0 goes although it scores more.
  const RunResult result = run(six_tokens(), "hae:dap=none,budget=1,bin=9");
  EXPECT_EQ(brief(result.log).substr(0, 8), "0/0/-1/0");
  EXPECT_FALSE(result.log.entries[0].pending_since.has_value());
  // With recent = 0 the lower score goes: s1 = 0.5.
  EXPECT_EQ(brief(run(six_tokens(), "hae:dap=none,budget=1,bin=9,recent=0").log).substr(0, 8), "0/0/-1/1");
}

TEST(RecycleBin, WithoutABudgetItHoldsThePromptsSize) {
  const RunResult result = run(six_tokens(), "hae:dap=none");
  EXPECT_EQ(result.limits[0].budget, 2);
  EXPECT_EQ(result.limits[0].bin, 1);  // 15 % of 2 rounds down to 0: at least 1
}

TEST(RecycleBin, SinksAreNeverMarked) {
  // Sinks {0}, l = 2: at step 1 eligible {1} only.
  const RunResult result = run(six_tokens(), "hae:dap=none,budget=2,bin=1,sinks=1");
  for (const LogEntry& entry : result.log.entries) {
    EXPECT_GT(entry.token, 0);
  }
  EXPECT_EQ(result.log.entries.size(), 4u);
}

TEST(RecycleBin, HoldsAWindowWhereItsBudgetExceedsIt) {
  // A window of 1: every token sees itself only. Of a budget of 3 one is left: the newest.
  MemoryTrace trace = attention_trace({{{1.0f}, {0.0f, 1.0f}, {0.0f, 0.0f, 1.0f}, {0.0f, 0.0f, 0.0f, 1.0f}}},
                                      2, {-1, -1, -1, -1});
  trace.info.masks[0].window = 1;
  const RunResult result = run(trace, "hae:dap=none,budget=3,bin=1");
  EXPECT_EQ(result.limits[0].budget, 1);
  EXPECT_EQ(brief(result.log), "0/0/-1/0 1/0/-1/1 2/0/-1/2");
  EXPECT_FALSE(result.log.entries[0].score.has_value());
  EXPECT_THAT(result.warnings, ::testing::Contains("layer 0: the budget is capped at 1, since no row sees "
                                                   "beyond the layer's window of 1"));
  // Also where the budget is the prompt.
  EXPECT_EQ(run(trace, "hae:dap=none,bin=1").log, result.log);
}

TEST(RecycleBin, ProtectingMoreThanTheBudgetIsImpossible) {
  EXPECT_THROW(run(six_tokens(), "hae:dap=none,budget=2,sinks=2"), ConfigError);  // sinks 2 + recent 1
  EXPECT_NO_THROW(run(six_tokens(), "hae:dap=none,budget=3,sinks=2"));
}

TEST(RecycleBin, ScoresPerExposureDoNotFavourOldTokens) {
  // P = 3, one step, l = 3, D = 1, recent = 1: of tokens 0, 1, 2 one goes after step 1.
  //   sums       s0 = 1 + .5 + .125 + .125 = 1.75   s1 = .5 + .25 + .125 = .875   s2 = .625 + .125 = .75
  //   exposures  4, 3, 2
  //   means      .4375, .2916.., .375
  // The sum takes token 2, which only two rows could see; the mean takes token 1.
  const MemoryTrace trace =
      attention_trace({{{1.0f}, {0.5f, 0.5f}, {0.125f, 0.25f, 0.625f}, {0.125f, 0.125f, 0.125f, 0.625f}}}, 3,
                      {-1, -1, -1, -1});
  const RunResult sum = run(trace, "hae:dap=none,budget=3,bin=1");
  const RunResult mean = run(trace, "hae:dap=none,budget=3,bin=1,score=mean");
  EXPECT_EQ(brief(sum.log), "1/0/-1/2@1");
  EXPECT_EQ(sum.log.entries[0].score, 0.75);
  EXPECT_EQ(brief(mean.log), "1/0/-1/1@1");
  EXPECT_EQ(mean.log.entries[0].score, 0.875 / 3.0);
}

}  // namespace
}  // namespace hae
