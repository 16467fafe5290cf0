#include "reference/greedy.hpp"

#include <gmock/gmock.h>

#include "testing/memory_trace.hpp"
#include "tests/support/policy_specs.hpp"

namespace hae {
namespace {

using testing::attention_trace;
using testing::brief;
using testing::MemoryTrace;
using testing::run;

TEST(Greedy, EvictsTheLowestScoreAfterEveryStep) {
  // l = 2, recent = 1. s0 = 1.5, s1 = .5 after the prompt.
  // step 1: s = 1.75 .75 .5; eligible {0, 1}: 1 goes.
  // step 2: residents {0, 2, 3} share .25 each of .75: s0 = 1.75 + 1/3, s2 = .5 + 1/3: 2 goes.
  const MemoryTrace trace = attention_trace(
      {{{1.0f}, {0.5f, 0.5f}, {0.25f, 0.25f, 0.5f}, {0.25f, 0.25f, 0.25f, 0.25f}}}, 2, {-1, -1, -1, -1});
  const RunResult result = run(trace, "greedy:budget=2");
  EXPECT_EQ(brief(result.log), "1/0/-1/1 2/0/-1/2");
  EXPECT_EQ(result.log.entries[0].score, 0.75);
  EXPECT_EQ(result.log.entries[1].score, 0.5 + static_cast<double>(0.25f / 0.75f));
  EXPECT_EQ(result.limits[0].capacity, 2);
}

TEST(Greedy, FullScoresAreNotRenormalised) {
  const MemoryTrace trace = attention_trace(
      {{{1.0f}, {0.5f, 0.5f}, {0.25f, 0.25f, 0.5f}, {0.25f, 0.25f, 0.25f, 0.25f}}}, 2, {-1, -1, -1, -1});
  const RunResult result = run(trace, "greedy:budget=2,scores=full");
  EXPECT_EQ(result.log.entries[1].score, 0.5 + 0.25);
}

TEST(Greedy, EvictsTheOlderOfTwoEqualScores) {
  // Every token of the prompt scores 1 (identity attention); budget 2 of 4, nothing protected: 0 and 1 go.
  const MemoryTrace trace = attention_trace(
      {{{1.0f}, {0.0f, 1.0f}, {0.0f, 0.0f, 1.0f}, {0.0f, 0.0f, 0.0f, 1.0f}}}, 4, {-1, -1, -1, -1});
  EXPECT_EQ(brief(run(trace, "greedy:budget=2,recent=0").log), "0/0/-1/0 0/0/-1/1");
}

TEST(Greedy, ProtectedTokensLeaveTheRankingAlsoWhenAllScoresTie) {
  // Six equal scores and a window of two, budget 4 of 8: kept {4, 5, 6, 7}.
  std::vector<std::vector<float>> identity;
  for (std::size_t i = 0; i < 8; ++i) {
    identity.emplace_back(i + 1, 0.0f).back() = 1.0f;
  }
  const MemoryTrace trace = attention_trace({identity}, 8, std::vector<Index>(8, -1));
  EXPECT_EQ(brief(run(trace, "greedy:budget=4,recent=2").log), "0/0/-1/0 0/0/-1/1 0/0/-1/2 0/0/-1/3");
}

TEST(Greedy, GroupedQueryHeadsAreInterleavedNotTiled) {
  // Four query heads, two KV heads: KV head 0 is read by heads 0 and 1. The last prompt row pays
  //   q0 (.5 .25 .25)  q1 (.5 .375 .125)  q2 (.125 .125 .75)  q3 (.125 .125 .75)
  // and earlier rows attend to themselves, so scores are those plus one each. Budget 1 of 3, nothing
  // protected.
  //   kv0: (.5 .3125 .1875) keeps 0      kv1: (.125 .125 .75) keeps 2
  // Tiled (kv0 from q0 and q2) both lanes would keep token 2.
  const auto head = [](std::vector<float> last) {
    return std::vector<std::vector<float>>{{1.0f}, {0.0f, 1.0f}, std::move(last)};
  };
  MemoryTrace trace = attention_trace({{head({0.5f, 0.25f, 0.25f}), head({0.5f, 0.375f, 0.125f}),
                                        head({0.125f, 0.125f, 0.75f}), head({0.125f, 0.125f, 0.75f})}},
                                      2, 3, {-1, -1, -1});
  const RunResult result = run(trace, "greedy:budget=1,recent=0,lane=kv_head");
  // kv0: s = 1.5, 1.3125, .1875: 2 then 1 go. kv1: 1.125, 1.125, .75: 2 goes, then of two equal ones the
  // older, 0.
  EXPECT_EQ(brief(result.log), "0/0/0/1 0/0/0/2 0/0/1/0 0/0/1/2");
}

TEST(Greedy, GroupReductionsAreTheirNames) {
  // One KV head of two query heads; last row pays (.5 .5 0) and (0 .25 .75); earlier rows attend to
  // themselves.
  //   mean: 1.25 1.375 .375   max: 1.5 1.5 .75   sum: row values are 2 (rows 0, 1), so 2.5 2.75 .75
  const auto head = [](std::vector<float> last) {
    return std::vector<std::vector<float>>{{1.0f}, {0.0f, 1.0f}, std::move(last)};
  };
  const MemoryTrace trace =
      attention_trace({{head({0.5f, 0.5f, 0.0f}), head({0.0f, 0.25f, 0.75f})}}, 1, 3, {-1, -1, -1});
  const auto scores = [&](const std::string& group) {
    const RunResult result = run(trace, "greedy:budget=1,recent=0,lane=kv_head,group=" + group);
    return std::pair(*result.log.entries[0].score, *result.log.entries[1].score);
  };
  EXPECT_EQ(scores("mean"), std::pair(1.25, 0.375));  // 2 and then 0 go; the log is sorted by token
  EXPECT_EQ(scores("max"), std::pair(1.5, 0.75));     // a tie of 0 and 1: the older goes
  EXPECT_EQ(scores("sum"), std::pair(2.5, 0.75));
}

TEST(Greedy, ItsBudgetCanMissWhatTheBinKeepsAtTheSamePeak) {
  // §8.3 G3, refuted with scores that change: T = 5, P = 1; row i < 4 gives itself 2^-i and token 0 the rest;
  // row 4 gives token 3 0.9375. DDES with l = 1, D = 2 misses nothing, greedy with l = 2 misses 0.9375.
  const MemoryTrace trace = attention_trace({{{1.0f},
                                              {0.5f, 0.5f},
                                              {0.75f, 0.0f, 0.25f},
                                              {0.875f, 0.0f, 0.0f, 0.125f},
                                              {0.0625f, 0.0f, 0.0f, 0.9375f, 0.0f}}},
                                            1, std::vector<Index>(5, -1));
  RunResult bin = run(trace, "hae:dap=none,budget=1,bin=2,recent=0,scores=full");
  RunResult greedy = run(trace, "greedy:budget=2,recent=0,scores=full");
  double bin_missed = 0.0;
  double greedy_missed = 0.0;
  for (Index step = 0; step < 4; ++step) {
    bin_missed += bin.decode.at(Metric::missed_mass, 0, 0, step);
    greedy_missed += greedy.decode.at(Metric::missed_mass, 0, 0, step);
  }
  EXPECT_EQ(bin_missed, 0.0);
  EXPECT_EQ(greedy_missed, 0.9375);
}

}  // namespace
}  // namespace hae
