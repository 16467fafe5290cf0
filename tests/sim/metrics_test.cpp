#include "sim/metrics.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "testing/memory_trace.hpp"
#include "tests/support/policy_specs.hpp"

namespace hae {
namespace {

using testing::attention_trace;
using testing::run;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(Summary, UsesNearestRanks) {
  // n = 20: p95 is the 19th smallest (⌈20 · 0.95⌉ = 19), p50 the 10th; NaN is in no population.
  std::vector<double> values = {kNan};
  for (int i = 20; i >= 1; --i) {
    values.push_back(i);
  }
  const Summary summary = *summarise(values);
  EXPECT_EQ(summary.mean, 10.5);
  EXPECT_EQ(summary.max, 20.0);
  EXPECT_EQ(summary.p50, 10.0);
  EXPECT_EQ(summary.p95, 19.0);
  EXPECT_FALSE(summarise(std::vector<double>{kNan}).has_value());
}

// Prompt {0, 1}, one decode step; greedy with budget 1 and no protection keeps the heavier token of the
// prompt.
//   scores after the prompt: s0 = 1 + 0.75, s1 = 0.25, so token 1 goes.
//   decode row (0.5, 0.25, 0.25): missed mass 0.25, a' = (2/3, -, 1/3).
//   v0 = (1, 0), v1 = (0, 4), v2 = (0, 0): o = (0.5, 1), o' = (2/3, 0), o - o' = (-1/6, 1).
//   missed pull: 0.25² ‖(0, 4) - (0.5, 1)‖² = 0.0625 · 9.25.
TEST(Metrics, AreTheirDefinitionsByHand) {
  testing::MemoryTrace trace =
      attention_trace({{{{1.0f}, {0.75f, 0.25f}, {0.5f, 0.25f, 0.25f}}}}, 2, {-1, -1, -1});
  trace.info.head_dim = 2;
  trace.info.has_values = true;
  trace.values = {{1.0f, 0.0f, 0.0f, 4.0f, 0.0f, 0.0f}};
  RunResult result = run(trace, "greedy:budget=1,recent=0");
  EXPECT_EQ(testing::brief(result.log), "0/0/-1/1 1/0/-1/2");
  EXPECT_EQ(result.decode.at(Metric::missed_mass, 0, 0, 0), 0.25);
  EXPECT_EQ(result.decode.at(Metric::kl, 0, 0, 0), -std::log(0.75));
  const double error = std::sqrt(1.0 / 36.0 + 1.0);
  EXPECT_NEAR(result.decode.at(Metric::output_error, 0, 0, 0), error, 1e-7);  // a' is float32: 2^-24 relative
  EXPECT_NEAR(result.decode.at(Metric::output_error_relative, 0, 0, 0), error / std::sqrt(1.25), 1e-7);
  EXPECT_EQ(result.decode.at(Metric::missed_pull, 0, 0, 0), 0.0625 * 9.25);
  EXPECT_EQ(result.top_now.at(0),
            0.25);  // two residents: the two largest of (0.5, 0.25, 0.25) leave 0.25 out
}

// T = 3, P = 2, a window of 2 in the decode row: keys {1, 2}, weights (0, 0.25, 0.75). The cache holds tokens
// {0, 2}: two residents, but the mask allows two keys, so nothing needs to be left out.
TEST(TopNow, CountsNoMoreKeysThanTheMaskAllows) {
  testing::MemoryTrace trace =
      attention_trace({{{{1.0f}, {0.75f, 0.25f}, {0.0f, 0.25f, 0.75f}}}}, 2, {-1, -1, -1});
  trace.info.masks[0].window = 2;
  const RunResult result = run(trace, "greedy:budget=1,recent=0");
  EXPECT_EQ(testing::brief(result.log), "0/0/-1/1 1/0/-1/2");
  EXPECT_EQ(result.top_now.at(0), 0.0);
}

TEST(Metrics, CountTokensBytesEventsAndMoves) {
  // P = 2, T = 4, greedy with budget 1: token 1 goes after the prompt (s0 = 1.75, s1 = 0.25), then 2 and 3 as
  // they come. Residents at attention time: 2, 2. Head_dim 8, 2 bytes, one KV head: a token is 2 * 8 * 2 = 32
  // bytes. Moved: nothing above token 1, 2 or 3 when each goes.
  const testing::MemoryTrace trace = attention_trace(
      {{{{1.0f}, {0.75f, 0.25f}, {1.0f, 0.0f, 0.0f}, {1.0f, 0.0f, 0.0f, 0.0f}}}}, 2, {-1, -1, -1, -1});
  const RunResult greedy = run(trace, "greedy:budget=1,recent=0");
  EXPECT_EQ(testing::brief(greedy.log), "0/0/-1/1 1/0/-1/2 2/0/-1/3");
  EXPECT_EQ(*count_tokens(trace.info, greedy).mean, 2.0);
  EXPECT_EQ(*count_tokens(trace.info, greedy).peak, 2);
  EXPECT_EQ(count_tokens(trace.info, greedy).final, 1.0);
  const Bytes bytes = *count_bytes(trace.info, greedy);
  EXPECT_EQ(*bytes.mean, 64.0);
  EXPECT_EQ(*bytes.peak, 64);
  EXPECT_EQ(bytes.final, 32);
  EXPECT_EQ(bytes.prefill, 64);
  EXPECT_EQ(count_events(greedy.log), 3);
  EXPECT_EQ(greedy.moved, 0);

  // A window without sinks and with two recent tokens evicts 0 when 2 comes and 1 when 3 comes: 2 tokens move
  // each time.
  const RunResult window = run(trace, "window:sinks=0,recent=2");
  EXPECT_EQ(testing::brief(window.log), "1/0/-1/0 2/0/-1/1");
  EXPECT_EQ(window.moved, 4);
}

TEST(Metrics, ARowThatLostAllItsMassIsCountedAndHasNoKl) {
  // The decode row looks at token 1 only, which greedy evicted after the prompt.
  const testing::MemoryTrace trace =
      attention_trace({{{{1.0f}, {0.75f, 0.25f}, {0.0f, 1.0f, 0.0f}}}}, 2, {-1, -1, -1});
  RunResult result = run(trace, "greedy:budget=1,recent=0");
  EXPECT_EQ(result.removed_all_rows, 1);
  EXPECT_EQ(result.decode.at(Metric::missed_mass, 0, 0, 0), 1.0);
  EXPECT_TRUE(std::isnan(result.decode.at(Metric::kl, 0, 0, 0)));
}

/// Head_dim 1, v = 1, 3, 5, 7. A window of one recent token evicts 0 when 2 comes and 1 when 3 comes, so the
/// row of token 2 attends to 1 and itself, and the row of token 3 to 2 and itself, to which it gives nothing.
testing::MemoryTrace trace_of_pulls() {
  testing::MemoryTrace trace = attention_trace(
      {{{{1.0f}, {0.5f, 0.5f}, {0.5f, 0.25f, 0.25f}, {0.5f, 0.5f, 0.0f, 0.0f}}}}, 2, {-1, -1, -1, -1});
  trace.info.head_dim = 1;
  trace.info.has_values = true;
  trace.values = {{1.0f, 3.0f, 5.0f, 7.0f}};
  return trace;
}

TEST(Metrics, MissedPullIsTheSumOfTheSquaredPullsOfWhatWasEvicted) {
  // Row of token 2: o = 0.5 · 1 + 0.25 · 3 + 0.25 · 5 = 2.5; token 0 is evicted: (0.5 · 1.5)² = 0.5625.
  // Row of token 3: o = 0.5 · 1 + 0.5 · 3 = 2; tokens 0 and 1 are: (0.5 · 1)² twice. It lost all its mass, so
  // there is no o' to compare with, and its missed pull is counted still.
  RunResult result = run(trace_of_pulls(), "window:sinks=0,recent=1");
  EXPECT_EQ(testing::brief(result.log), "0/0/-1/0 1/0/-1/1 2/0/-1/2");
  EXPECT_EQ(result.decode.at(Metric::missed_pull, 0, 0, 0), 0.5625);
  EXPECT_EQ(result.decode.at(Metric::missed_pull, 0, 0, 1), 0.5);
  EXPECT_EQ(result.removed_all_rows, 1);
  EXPECT_TRUE(std::isnan(result.decode.at(Metric::output_error, 0, 0, 1)));
}

TEST(Metrics, WithoutValuesThereIsNoMissedPull) {
  testing::MemoryTrace trace = trace_of_pulls();
  trace.info.has_values = false;
  trace.values.clear();
  const RunResult result = run(trace, "window:sinks=0,recent=1");
  EXPECT_FALSE(summarise(result.decode.all(Metric::missed_pull)).has_value());
  EXPECT_TRUE(summarise(result.decode.all(Metric::missed_mass)).has_value());
}

TEST(Metrics, AMaskedRowIsInNoAggregateAndCounted) {
  const testing::MemoryTrace trace =
      attention_trace({{{{1.0f}, {0.0f, 0.0f}, {0.0f, 0.0f, 0.0f}}}}, 2, {-1, -1, -1});
  RunResult result = run(trace, "greedy:budget=1,recent=0");
  EXPECT_EQ(result.masked_rows, 2);
  EXPECT_FALSE(summarise(result.decode.all(Metric::missed_mass)).has_value());
}

/// One layer of two KV heads. Text 0; a picture 1, 2; text 3; a picture 4; text 5; then 6 and 7 are
/// generated, though the recording says that 7 is of a picture too.
SequenceInfo info_of_kinds() {
  SequenceInfo info;
  info.layers = 1;
  info.query_heads = 2;
  info.kv_heads = 2;
  info.tokens = 8;
  info.prompt = 6;
  info.image = {-1, 0, 0, -1, 1, -1, -1, 1};
  return info;
}

/// A run that evicted (layer, lane, token), in this order.
RunResult run_that_evicted(LaneKind lanes, const std::vector<std::array<Index, 3>>& evicted) {
  RunResult run;
  run.lanes = lanes;
  for (const auto& [layer, lane, token] : evicted) {
    run.log.entries.push_back({.layer = layer, .lane = lane, .token = token});
  }
  return run;
}

TEST(TokenKinds, ArePicturesTextBeforeTheFirstTextAfterAndWhatWasGenerated) {
  using enum TokenKind;
  EXPECT_EQ(token_kinds(info_of_kinds()),
            (std::vector{text_before, visual, visual, text_after, visual, text_after, generated, generated}));
}

TEST(TokenKinds, OfAPromptWithoutPicturesAreAfter) {
  using enum TokenKind;
  SequenceInfo info = info_of_kinds();
  info.prompt = 2;
  info.image = {-1, -1, -1, -1, 1, -1, -1, -1};  // what the model produced is no picture of the prompt
  EXPECT_EQ(token_kinds(info), (std::vector{text_after, text_after, generated, generated, generated,
                                            generated, generated, generated}));
}

TEST(TokenKinds, AreCountedOnceForEachLaneThatATokenLeft) {
  // Lane 0 loses 1, 4 (visual), 3 (text after) and 6 (generated); lane 1 loses 1. Of 2 lanes · 3 visual
  // tokens 3 of 6 are left, of 2 · 1 text before all, of 2 · 2 text after 3 of 4, of 2 · 2 generated 3 of 4.
  const SequenceInfo info = info_of_kinds();
  const RunResult run =
      run_that_evicted(LaneKind::kv_head, {{0, 0, 1}, {0, 0, 4}, {0, 0, 3}, {0, 0, 6}, {0, 1, 1}});
  EXPECT_EQ(count_evicted_kinds(info, run.log), (ByKind<Index>{3, 0, 1, 1}));
  EXPECT_EQ(kept_kinds(info, run), (ByKind<std::optional<double>>{0.5, 1.0, 0.75, 0.75}));
}

TEST(TokenKinds, AKindThatIsNotThereHasNoKeptShare) {
  SequenceInfo info = info_of_kinds();
  info.prompt = 8;
  info.image.assign(8, -1);
  // One lane of 8 tokens loses two.
  const RunResult run = run_that_evicted(LaneKind::layer, {{0, kLayerLane, 1}, {0, kLayerLane, 2}});
  EXPECT_EQ(count_evicted_kinds(info, run.log), (ByKind<Index>{0, 0, 2, 0}));
  EXPECT_EQ(kept_kinds(info, run),
            (ByKind<std::optional<double>>{std::nullopt, std::nullopt, 0.75, std::nullopt}));
}

TEST(KeptOverlap, IsTheMeanJaccardIndexOverLayers) {
  // T = 4. Layer 0: {0, 1, 2} and {1, 2, 3}: 2 of 4. Layer 1: {0, 3} and {0, 1, 2, 3}: 2 of 4 are in both.
  // Layer 2: {0} and {1}: 0. Layer 3: nothing and nothing: 1. The mean of 0.5, 0.5, 0 and 1 is 0.5.
  SequenceInfo info = info_of_kinds();
  info.layers = 4;
  info.tokens = 4;
  constexpr Index kOwn = kLayerLane;
  const std::vector<RunResult> runs = {// As they went, not by token: 2 before 1.
                                       run_that_evicted(LaneKind::layer, {{0, kOwn, 3},
                                                                          {1, kOwn, 2},
                                                                          {1, kOwn, 1},
                                                                          {2, kOwn, 1},
                                                                          {2, kOwn, 2},
                                                                          {2, kOwn, 3},
                                                                          {3, kOwn, 0},
                                                                          {3, kOwn, 1},
                                                                          {3, kOwn, 2},
                                                                          {3, kOwn, 3}}),
                                       run_that_evicted(LaneKind::layer, {{0, kOwn, 0},
                                                                          {2, kOwn, 3},
                                                                          {2, kOwn, 2},
                                                                          {2, kOwn, 0},
                                                                          {3, kOwn, 3},
                                                                          {3, kOwn, 2},
                                                                          {3, kOwn, 1},
                                                                          {3, kOwn, 0}})};
  EXPECT_EQ(kept_overlap(info, runs), (std::vector<std::vector<double>>{{1.0, 0.5}, {0.5, 1.0}}));
}

TEST(KeptOverlap, ALayerStandsForEachOfItsKvHeads) {
  // T = 8. The layer keeps {0, ..., 5}. KV head 0 keeps {0, 1, 2}: 3 of 6. KV head 1 keeps {4, ..., 7}: 2 of
  // 8. The mean of 0.5 and 0.25 is 0.375.
  const std::vector<RunResult> runs = {
      run_that_evicted(LaneKind::layer, {{0, kLayerLane, 6}, {0, kLayerLane, 7}}),
      run_that_evicted(LaneKind::kv_head, {{0, 0, 3},
                                           {0, 0, 4},
                                           {0, 0, 5},
                                           {0, 0, 6},
                                           {0, 0, 7},
                                           {0, 1, 0},
                                           {0, 1, 1},
                                           {0, 1, 2},
                                           {0, 1, 3}})};
  EXPECT_EQ(kept_overlap(info_of_kinds(), runs),
            (std::vector<std::vector<double>>{{1.0, 0.375}, {0.375, 1.0}}));
}

TEST(Fairness, ComparesIntegerTotalsAgainstOnePercentAndOneTokenALane) {
  SequenceInfo info;
  info.layers = 1;
  info.kv_heads = 1;
  info.tokens = 1010;
  info.prompt = 1000;
  const auto with_total = [](Index total) {
    RunResult run;
    run.attention_tokens = {total};
    return run;
  };
  // First: 10,000 token-steps over 10 steps. One percent is 100, one token a lane is 10.
  EXPECT_FALSE(unequal_bytes(info, with_total(10'000), with_total(10'100)));
  EXPECT_TRUE(unequal_bytes(info, with_total(10'000), with_total(10'101)));
  EXPECT_TRUE(unequal_bytes(info, with_total(10'000), with_total(9'899)));
  // First: 500. One percent is 5, one token a lane is 10.
  EXPECT_FALSE(unequal_bytes(info, with_total(500), with_total(510)));
  EXPECT_TRUE(unequal_bytes(info, with_total(500), with_total(511)));
}

}  // namespace
}  // namespace hae
