#include <gmock/gmock.h>

#include "reference/draws.hpp"
#include "reference/policies.hpp"
#include "reference/random.hpp"
#include "testing/memory_trace.hpp"
#include "tests/support/policy_specs.hpp"

namespace hae {
namespace {

using testing::attention_trace;
using testing::brief;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::MemoryTrace;
using testing::run;
using Rows = std::vector<std::vector<float>>;

/// One head of text.
MemoryTrace text(const Rows& rows, Index prompt) {
  return attention_trace({rows}, prompt, std::vector<Index>(rows.size(), -1));
}

/// Every token looks at itself alone, so that all sums over rows are 1.
MemoryTrace identity(Index tokens, Index prompt) {
  Rows rows;
  for (Index i = 0; i < tokens; ++i) {
    rows.emplace_back(at(i + 1), 0.0f).back() = 1.0f;
  }
  return text(rows, prompt);
}

std::vector<Index> final_residents(const MemoryTrace& trace, const std::string& spec) {
  return testing::residents(trace, run(trace, spec), 0, 0).back();
}

std::vector<double> scores(const RunResult& result) {
  std::vector<double> all;
  for (const LogEntry& entry : result.log.entries) {
    all.push_back(entry.score.value());
  }
  return all;
}

/// A prompt of 4 with sums 2.5, .625, .5, .375; every later row gives token 0 0.5, token 1 0.25 and itself
/// 0.25.
MemoryTrace two_heavy_hitters() {
  Rows rows = {{1.0f}, {0.5f, 0.5f}, {0.5f, 0.125f, 0.375f}, {0.5f, 0.0f, 0.125f, 0.375f}};
  for (std::size_t i = 4; i < 10; ++i) {
    std::vector<float> row(i + 1, 0.0f);
    row[0] = 0.5f;
    row[1] = 0.25f;
    row[i] = 0.25f;
    rows.push_back(row);
  }
  return text(rows, 4);
}

TEST(Streaming, KeepsSinksAndTheNewestAtOriginalPositions) {
  const MemoryTrace trace = identity(10, 1);
  EXPECT_THAT(final_residents(trace, "streaming:sinks=1,recent=3"), ElementsAre(0, 7, 8, 9));
  EXPECT_EQ(run(trace, "streaming:budget=6").log, run(trace, "window:budget=6").log);
}

TEST(Streaming, RefusesPositionsOfTheCacheAndSaysWhatTheyNeed) {
  try {
    run(identity(10, 1), "streaming:recent=3,positions=cache");
    FAIL() << "it ran";
  } catch (const NeedsError& error) {
    EXPECT_THAT(error.what(), HasSubstr("lacks queries and keys before rotary embedding"));
    EXPECT_THAT(error.what(), HasSubstr("streaming:recent=3,positions=cache"));
  }
  EXPECT_THROW(reference::make_policy("streaming:recent=3,positions=new"), ConfigError);
}

TEST(Tova, KeepsWhatTheNewestRowAttendsToAndMayDropTheNewestToken) {
  // Budget 2. Prompt row 2: .25 .25 .5, a tie: 0 goes. Step 1 over {1, 2, 3}: .125 .25 .125 of .5, so .25 .5
  // .25, a tie of 1 and 3: 1 goes. Step 2 over {2, 3,
  // 4}: .5 .375 .125: the newest goes.
  const MemoryTrace trace = text({{1.0f},
                                  {0.0f, 1.0f},
                                  {0.25f, 0.25f, 0.5f},
                                  {0.5f, 0.125f, 0.25f, 0.125f},
                                  {0.0f, 0.0f, 0.5f, 0.375f, 0.125f}},
                                 3);
  const RunResult result = run(trace, "tova:budget=2");
  EXPECT_EQ(brief(result.log), "0/0/-1/0 1/0/-1/1 2/0/-1/4");
  EXPECT_THAT(scores(result), ElementsAre(0.25, 0.25, 0.125));
}

TEST(Tova, KeepsOneSetForAllHeads) {
  // Last rows .75 .25 0 and 0 .25 .75, mean .375 .25 .375: 1 goes. Alone the heads would drop 2 and 0.
  const auto head = [](std::vector<float> last) { return Rows{{1.0f}, {0.0f, 1.0f}, std::move(last)}; };
  const MemoryTrace trace =
      attention_trace({{head({0.75f, 0.25f, 0.0f}), head({0.0f, 0.25f, 0.75f})}}, 2, 3, {-1, -1, -1});
  EXPECT_EQ(brief(run(trace, "tova:budget=2").log), "0/0/-1/1");
}

TEST(H2OFlexgen, KeepsHeavyHittersAndTheNewest) {
  const MemoryTrace trace = two_heavy_hitters();
  EXPECT_THAT(final_residents(trace, "h2o/flexgen:budget=4"), ElementsAre(0, 1, 8, 9));
  // Without recent tokens the cache freezes: a new token, at 0.25, is always the lowest.
  EXPECT_THAT(final_residents(trace, "h2o/flexgen:budget=4,recent=0"), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(run(trace, "h2o/flexgen:budget=4,recent=0").warnings,
              Contains("0 of 6 generated tokens retained in 1 of 1 lanes"));
}

TEST(H2OFlexgen, ProtectsOneTokenFewerInThePrefillThanInAStep) {
  // k = 2, 2k - 1 = 3 tokens. Prompt sums 2.25 1.125 .25 .375: outside the newest one, 2 is the lowest and
  // goes (h2o/layerwise protects two and takes 1). Step 1 over {0, 1, 3, 4}: 2.75 1.1875 .5625 .25, the
  // newest two are safe: 1 goes.
  const MemoryTrace trace = text({{1.0f},
                                  {0.5f, 0.5f},
                                  {0.5f, 0.375f, 0.125f},
                                  {0.25f, 0.25f, 0.125f, 0.375f},
                                  {0.5f, 0.0625f, 0.0f, 0.1875f, 0.25f}},
                                 4);
  const RunResult result = run(trace, "h2o/flexgen:budget=3,recent=2");
  EXPECT_EQ(brief(result.log), "0/0/0/2 1/0/0/1");
  EXPECT_THAT(scores(result), ElementsAre(0.25, 1.1875));
  EXPECT_EQ(result.limits[0].recent, 2);
  EXPECT_EQ(brief(run(trace, "h2o/layerwise:budget=3,recent=2").log), "0/0/0/1 1/0/0/2");
}

TEST(H2OHistory, ScoresTheMeanOverTheRowsSinceATokenCame) {
  // Prompt sums 2, .75, .25 over 3, 2, 1 rows: .667 .375 .25, one value each. Step 1 adds .5 .125 .25: means
  // .583 .25 .25 and token 3 is recent: 1 goes. (By sums it would be 2.) Step 2 over {0, 2, 3, 4} adds .25
  // each: .472, .25, (.125 + .25)/2 = .1875: 3 goes.
  const MemoryTrace trace = text({{1.0f},
                                  {0.5f, 0.5f},
                                  {0.5f, 0.25f, 0.25f},
                                  {0.5f, 0.125f, 0.25f, 0.125f},
                                  {0.25f, 0.0f, 0.25f, 0.25f, 0.25f}},
                                 3);
  const RunResult result = run(trace, "h2o/history:budget=3,sinks=0,recent=1");
  EXPECT_EQ(brief(result.log), "1/0/0/1 2/0/0/3");
  EXPECT_THAT(scores(result), ElementsAre(0.25, 0.1875));
}

TEST(H2OHistory, ForgetsAllButTheLastValues) {
  // Prompt means .75 .5; step 1 (0 .875 .125), step 2 (0 .5 .25 .25), budget 3. All values: 0 has .25, 2 has
  // (.125 + .25)/2 = .1875 and goes. The last two: 0 has 0 and goes.
  const MemoryTrace trace =
      text({{1.0f}, {0.5f, 0.5f}, {0.0f, 0.875f, 0.125f}, {0.0f, 0.5f, 0.25f, 0.25f}}, 2);
  EXPECT_EQ(brief(run(trace, "h2o/history:budget=3,sinks=0,recent=1").log), "2/0/0/2");
  EXPECT_EQ(brief(run(trace, "h2o/history:budget=3,sinks=0,recent=1,history=2").log), "2/0/0/0");
}

TEST(H2OHistory, CanCountRowsThatAttendMoreThanEvenly) {
  // Prompt: 1 >= 1 and .5, .5 >= 1/2, so sums 2 1 over 2 1 rows: 1 1. Step 1 (.25 .5 .25) against 1/3: 0 1 0.
  // Means .5 1: 0 goes, or 1 where 0 is a sink.
  const MemoryTrace trace = text({{1.0f}, {0.5f, 0.5f}, {0.25f, 0.5f, 0.25f}}, 2);
  const RunResult result = run(trace, "h2o/history:budget=2,sinks=0,recent=1,indicator=yes");
  EXPECT_EQ(brief(result.log), "1/0/0/0");
  EXPECT_THAT(scores(result), ElementsAre(0.5));
  EXPECT_EQ(brief(run(trace, "h2o/history:budget=2,sinks=1,recent=1,indicator=yes").log), "1/0/0/1");
}

/// Two blocks of two tokens and the newest one; the last two prompt rows count.
MemoryTrace three_blocks() {
  return text({{1.0f},
               {0.0f, 1.0f},
               {0.0f, 0.0f, 1.0f},
               {0.0f, 0.0f, 0.0f, 1.0f},
               {0.25f, 0.25f, 0.0f, 0.25f, 0.25f},
               {0.125f, 0.125f, 0.25f, 0.25f, 0.125f, 0.125f},
               {0.0f, 0.0f, 0.25f, 0.25f, 0.0f, 0.25f, 0.25f}},
              6);
}

const std::string kBlocks = "h2o/ov-block:budget=4,block=2,sinks=0,recent=2,window=2";

TEST(H2OOvBlock, EvictsTheLowestBlockAndOfEqualOnesTheOlder) {
  // Rows 4 and 5 give .375 .375 | .25 .5 | (.375 .125): .75 twice, so the first block goes. Step 1 opens a
  // block of one token, which is safe, and adds 0 0 .25 .25 0 .25: 2 3 have .5 + .75, 4 5 have .375 + .375
  // and go.
  const MemoryTrace trace = three_blocks();
  const RunResult result = run(trace, kBlocks + ",pool=1");
  EXPECT_EQ(brief(result.log), "0/0/-1/0 0/0/-1/1 1/0/-1/4 1/0/-1/5");
  EXPECT_THAT(scores(result), ElementsAre(0.75, 0.75, 0.75, 0.75));
}

TEST(H2OOvBlock, PoolsForwardOverTheTokensThatAreThere) {
  // Pool 2. Row 4: .25 .25 | .25 .25 | .25; row 5: .125 .25 | .25 .25 | .125 .125. Blocks .875, 1: the first
  // goes.
  // Step 1 over {2 .. 6}: 2 has max(.25, .25), 3 max(.25, 0), 4 max(0, .25), 5 .25: 2 3 have 1.5, 4 5 have
  // .375 + .25 + .125 + .25 = 1 and go.
  const RunResult result = run(three_blocks(), kBlocks + ",pool=2");
  EXPECT_EQ(brief(result.log), "0/0/-1/0 0/0/-1/1 1/0/-1/4 1/0/-1/5");
  EXPECT_THAT(scores(result), ElementsAre(0.875, 0.875, 1.0, 1.0));
}

TEST(H2OOvBlock, CanDivideByTheRowsThatCounted) {
  // Two rows for the first four tokens: .75 / 2. Step 1: 2 3 have 1.25 / 3; 4 has .375 / 3 and 5 .375 / 2, so
  // .3125, and go.
  const RunResult result = run(three_blocks(), kBlocks + ",pool=1,norm=norm_sum");
  EXPECT_EQ(brief(result.log), "0/0/-1/0 0/0/-1/1 1/0/-1/4 1/0/-1/5");
  EXPECT_THAT(scores(result), ElementsAre(0.375, 0.375, 0.3125, 0.3125));
}

TEST(H2OOvBlock, SumsTheHeadsOfTheLayer) {
  const std::vector<float> row = {0.25f, 0.25f, 0.5f};
  const Rows head = {{1.0f}, {0.0f, 1.0f}, row};
  const MemoryTrace trace = attention_trace({{head, head}}, 1, 3, {-1, -1, -1});
  const RunResult result = run(trace, "h2o/ov-block:budget=2,block=1,sinks=0,recent=1,window=1,pool=1");
  EXPECT_EQ(brief(result.log), "0/0/-1/0");
  EXPECT_THAT(scores(result), ElementsAre(0.5));
}

TEST(H2OOvBlock, WantsWholeBlocks) {
  EXPECT_THROW(reference::make_policy("h2o/ov-block:block=4,sinks=2,recent=4"), ConfigError);
  EXPECT_THROW(reference::make_policy("h2o/ov-block:block=4,sinks=4,recent=6"), ConfigError);
  EXPECT_THROW(reference::make_policy("h2o/ov-block:block=4,recent=0"), ConfigError);
  // Seven tokens are three blocks of two.
  const RunResult result = run(identity(12, 9), "h2o/ov-block:budget=7,block=2,sinks=2,recent=2");
  EXPECT_EQ(result.limits[0].budget, 6);
  EXPECT_THROW(run(identity(12, 9), "h2o/ov-block:budget=7,block=4,sinks=4,recent=4"), ConfigError);
}

TEST(Scissorhands, ImportanceFadesAndGrowsByTheNewestRow) {
  // Window 2, decay 1/2, budget 2, recent 1. Rows 1 and 2: .75 .75 .5; 0 and 1 tie: 0 goes. Step 1 over {1,
  // 2, 3}: .375 + .25, .25 + .25, .5: 2 goes. Step 2 over {1, 3, 4}: .3125 + .125, .25 + .375: 1 goes.
  const MemoryTrace trace = text({{1.0f},
                                  {0.5f, 0.5f},
                                  {0.25f, 0.25f, 0.5f},
                                  {0.0f, 0.25f, 0.25f, 0.5f},
                                  {0.0f, 0.125f, 0.0f, 0.375f, 0.5f}},
                                 3);
  const RunResult result = run(trace, "scissorhands:budget=2,sinks=0,recent=1,window=2,decay=0.5");
  EXPECT_EQ(brief(result.log), "0/0/0/0 1/0/0/2 2/0/0/1");
  EXPECT_THAT(scores(result), ElementsAre(0.75, 0.5, 0.4375));
}

TEST(Scissorhands, SamplesByOneFixedDrawAToken) {
  // All importances are 1, so the score is 1/T and the token's draw.
  const MemoryTrace trace = identity(8, 8);
  const RunResult result =
      run(trace, "scissorhands:budget=4,sinks=1,recent=1,select=sample,temperature=0.5,seed=3");
  const auto key = [](Index token) {
    return 2.0 + reference::gumbel(reference::random_priority(3, 0, 0, token));
  };
  ASSERT_EQ(result.log.entries.size(), 4u);
  const std::vector<Index> left = testing::residents(trace, result, 0, 0).back();
  for (const LogEntry& entry : result.log.entries) {
    EXPECT_EQ(*entry.score, key(entry.token));
    for (const Index kept : left) {
      EXPECT_TRUE(kept == 0 || kept == 7 || key(entry.token) < key(kept));
    }
  }
}

TEST(Scissorhands, RefusesWhatMeansNothing) {
  EXPECT_THROW(reference::make_policy("scissorhands:seed=1"), ConfigError);
  EXPECT_THROW(reference::make_policy("scissorhands:decay=1.5"), ConfigError);
  EXPECT_THROW(reference::make_policy("scissorhands:select=sample,temperature=0"), ConfigError);
}

/// A prompt of eight whose last row is .0625 .0625 .25 and .125 five times, and one more token.
MemoryTrace nine_tokens() {
  Rows rows;
  for (std::size_t i = 0; i < 9; ++i) {
    rows.emplace_back(i + 1, 0.0f).back() = 1.0f;
  }
  rows[7] = {0.0625f, 0.0625f, 0.25f, 0.125f, 0.125f, 0.125f, 0.125f, 0.125f};
  return text(rows, 8);
}

const std::string kNacl = "nacl:budget=4,sinks=1,recent=1,proxies=1";

TEST(Nacl, WithoutDrawsKeepsTheLargestProxySumsAndEvictsNothingLater) {
  // 0 and 7 are protected; 2 and of the equal ones the newest, 6, stay.
  const RunResult result = run(nine_tokens(), kNacl + ",random=0");
  EXPECT_EQ(brief(result.log), "0/0/0/1 0/0/0/3 0/0/0/4 0/0/0/5");
  EXPECT_THAT(scores(result), ElementsAre(0.0625, 0.125, 0.125, 0.125));
  EXPECT_TRUE(result.limits[0].grows);
  EXPECT_THAT(final_residents(nine_tokens(), kNacl + ",random=0"), ElementsAre(0, 2, 6, 7, 8));
}

/// How often each token stayed over seeds 0 .. 999.
std::vector<Index> times_kept(const std::string& spec) {
  std::vector<Index> kept(9, 0);
  for (int seed = 0; seed < 1000; ++seed) {
    for (const Index token : final_residents(nine_tokens(), spec + ",seed=" + std::to_string(seed))) {
      ++kept[at(token)];
    }
  }
  return kept;
}

TEST(Nacl, DrawsTheRestWithTheProbabilityOfTheirProxySums) {
  // The best one, 2, always stays; one of 1, 3, 4, 5, 6 is drawn. T = 1/16: logits 1 2 2 2 2, so token 1 has
  // 1/(1 + 4e) = .0842 and the others .2290. Five standard deviations of 1000 draws are 44 and 66.
  const std::vector<Index> kept = times_kept(kNacl + ",random=1,temperature=0.0625");
  EXPECT_EQ(kept[0] + kept[2] + kept[7] + kept[8], 4000);
  EXPECT_NEAR(static_cast<double>(kept[1]), 84.2, 44.0);
  for (const std::size_t token : {3U, 4U, 5U, 6U}) {
    EXPECT_NEAR(static_cast<double>(kept[token]), 229.0, 66.0) << token;
  }
}

TEST(Nacl, DrawsEvenlyAtTemperatureZero) {
  // One of five: 200, five standard deviations are 63.
  const std::vector<Index> kept = times_kept(kNacl + ",random=1,temperature=0");
  for (const std::size_t token : {1U, 3U, 4U, 5U, 6U}) {
    EXPECT_NEAR(static_cast<double>(kept[token]), 200.0, 63.0) << token;
  }
}

TEST(Nacl, TheLogShowsTheDraw) {
  const RunResult result = run(nine_tokens(), kNacl + ",random=1,seed=5");
  ASSERT_EQ(result.log.entries.size(), 4u);
  for (const LogEntry& entry : result.log.entries) {
    const double sum = entry.token == 1 ? 0.0625 : 0.125;
    EXPECT_EQ(*entry.score, sum + reference::gumbel(reference::random_priority(5, 0, 0, entry.token)));
  }
}

TEST(Nacl, DrawsAShareOfWhatIsNotProtected) {
  // Budget 7, one sink, one recent token: 40 % of 5 are 2 draws.
  const auto log = [](const std::string& drawn) {
    return run(nine_tokens(), "nacl:budget=7,sinks=1,recent=1,proxies=1,seed=2,random=" + drawn).log;
  };
  EXPECT_EQ(log("40%"), log("2"));
  EXPECT_THROW(run(nine_tokens(), kNacl + ",random=3"), ConfigError);
  EXPECT_THROW(reference::make_policy("nacl:random=120%"), ConfigError);
}

TEST(OnlineBaselines, ProtectedTokensLeaveTheRankingAlsoWhenAllScoresTie) {
  // Six equal scores and a window of two, budget 4 of 8: kept {4, 5, 6, 7}.
  for (const std::string spec :
       {"h2o/flexgen:budget=4,recent=2", "scissorhands:budget=4,sinks=0,recent=2",
        "nacl:budget=4,sinks=0,recent=2,random=0", "h2o/ov-block:budget=4,block=1,sinks=0,recent=2,pool=1"}) {
    EXPECT_THAT(final_residents(identity(8, 8), spec), ElementsAre(4, 5, 6, 7)) << spec;
  }
}

TEST(OnlineBaselines, RefuseToProtectMoreThanTheBudget) {
  for (const std::string spec : {"h2o/flexgen:budget=3,recent=4", "h2o/history:budget=13",
                                 "scissorhands:budget=13", "nacl:budget=13"}) {
    EXPECT_THROW(run(identity(20, 16), spec), ConfigError) << spec;
  }
}

}  // namespace
}  // namespace hae
