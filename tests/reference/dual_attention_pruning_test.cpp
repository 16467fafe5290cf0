#include "reference/dual_attention_pruning.hpp"

#include <gmock/gmock.h>

#include "testing/memory_trace.hpp"
#include "tests/support/policy_specs.hpp"

// DAP by hand. Every trace here is prompt only (P = T), so nothing but the pruning acts.

namespace hae {
namespace {

using testing::attention_trace;
using testing::brief;
using ::testing::Contains;
using ::testing::HasSubstr;
using testing::MemoryTrace;
using testing::run;

std::string pruned(const MemoryTrace& trace, const std::string& options) {
  return brief(run(trace, "hae:ddes=none," + options).log);
}

/// Five tokens: text, three of a picture, text; two layers. Row 4 is the only text row after the picture:
///   A = (1: 0.25, 2: 0.125, 3: 0.125), A_V = 0.5
MemoryTrace five_tokens() {
  const std::vector<std::vector<float>> rows = {{1.0f},
                                                {0.5f, 0.5f},
                                                {0.5f, 0.25f, 0.25f},
                                                {0.25f, 0.25f, 0.25f, 0.25f},
                                                {0.25f, 0.25f, 0.125f, 0.125f, 0.25f}};
  return attention_trace({rows, rows}, 5, {-1, 0, 0, 0, -1});
}

TEST(DualAttentionPruning, EvictsWhatIsBelowBothThresholdsAndBroadcastsIt) {
  // r A_V = 0.3 * 0.5 = 0.15: 2 and 3 are below it, 1 is not; all are below alpha = 0.2 except 1.
  EXPECT_EQ(pruned(five_tokens(), "r=0.3,alpha=0.2"), "0/0/-1/2 0/0/-1/3 0/1/-1/2w 0/1/-1/3w");
}

TEST(DualAttentionPruning, BothComparisonsAreStrict) {
  // r A_V = 0.25 * 0.5 = 0.125 = A_2 = A_3: not below.
  EXPECT_EQ(pruned(five_tokens(), "r=0.25,alpha=0.2"), "");
  // max_i a_i2 = 0.125 = alpha: not below.
  EXPECT_EQ(pruned(five_tokens(), "r=0.3,alpha=0.125"), "");
}

TEST(DualAttentionPruning, LogsTheAttentionOfTheDecidingLayer) {
  const RunResult result = run(five_tokens(), "hae:ddes=none,r=0.3,alpha=0.2");
  for (const LogEntry& entry : result.log.entries) {
    EXPECT_EQ(entry.score, 0.125);
    EXPECT_FALSE(entry.pending_since.has_value());
  }
}

TEST(DualAttentionPruning, TakesTheMeanOrTheMaximumOverAllHeads) {
  // Heads pay token 1 (0.5, 0), token 2 (0.25, 0.25). mean: A = (0.25, 0.25); max: A = (0.5, 0.25).
  // A_V: 0.5 and 0.75. r = 0.5 with mean: 0.25 < 0.25 is false; with max: 0.25 < 0.375 is true for token 2.
  const MemoryTrace trace =
      attention_trace({{{{1.0f}, {0.5f, 0.5f}, {0.5f, 0.25f, 0.25f}, {0.25f, 0.5f, 0.25f, 0.0f}},
                        {{1.0f}, {0.5f, 0.5f}, {0.5f, 0.25f, 0.25f}, {0.5f, 0.0f, 0.25f, 0.25f}}}},
                      2, 4, {-1, 0, 0, -1});
  EXPECT_EQ(pruned(trace, "r=0.5,alpha=1"), "");
  EXPECT_EQ(pruned(trace, "r=0.5,alpha=1,heads=max"), "0/0/-1/2");
}

TEST(DualAttentionPruning, ScopeImageTakesAVOfEachPicture) {
  // Pictures {0, 1} and {2, 3}; row 4 pays (0.25, 0.0625, 0.125, 0.5) and itself 0.0625.
  //   sequence: A_V = 0.9375, r A_V = 0.234375: 1 (0.0625) and 2 (0.125) go.
  //   image:    A_V = 0.3125 and 0.625, r A_V = 0.078125 and 0.15625: 1 goes, 2 goes; with r = 0.125
  //   (0.0390625 and
  //             0.078125) nothing does, while sequence (0.1171875) still evicts 1.
  const MemoryTrace trace = attention_trace({{{1.0f},
                                              {0.5f, 0.5f},
                                              {0.5f, 0.25f, 0.25f},
                                              {0.25f, 0.25f, 0.25f, 0.25f},
                                              {0.25f, 0.0625f, 0.125f, 0.5f, 0.0625f}}},
                                            5, {0, 0, 1, 1, -1});
  EXPECT_EQ(pruned(trace, "alpha=1,r=0.25"), "0/0/-1/1 0/0/-1/2");
  EXPECT_EQ(pruned(trace, "alpha=1,r=0.25,scope=image"), "0/0/-1/1 0/0/-1/2");
  EXPECT_EQ(pruned(trace, "alpha=1,r=0.125"), "0/0/-1/1");
  EXPECT_EQ(pruned(trace, "alpha=1,r=0.125,scope=image"), "");
}

TEST(DualAttentionPruning, MaxEvictedTakesTheLowestFirstAndTheOlderOnATie) {
  EXPECT_EQ(pruned(five_tokens(), "r=0.3,alpha=0.2,max_evicted=1"), "0/0/-1/2 0/1/-1/2w");
  EXPECT_EQ(pruned(five_tokens(), "r=0.3,alpha=0.2,max_evicted=0"), "");
  // Of all three the first has the largest sum.
  EXPECT_EQ(pruned(five_tokens(), "r=3,alpha=1,max_evicted=2"), "0/0/-1/2 0/0/-1/3 0/1/-1/2w 0/1/-1/3w");
}

TEST(DualAttentionPruning, SinksCountInTheTotalButStay) {
  // Without sinks 2 and 3 go; positions below 3 are sinks, and A_V is still 0.5.
  EXPECT_EQ(pruned(five_tokens(), "r=0.3,alpha=0.2,sinks=3"), "0/0/-1/3 0/1/-1/3w");
}

TEST(DualAttentionPruning, WithoutBroadcastEveryLayerDecidesForItself) {
  MemoryTrace trace = five_tokens();
  // Layer 1's row 4 pays (0.25, 0.0625, 0.375, 0.25, 0.0625): A_V = 0.6875, r A_V = 0.20625: only 1 goes.
  const std::vector<float> row = {0.25f, 0.0625f, 0.375f, 0.25f, 0.0625f};
  std::ranges::copy(row, trace.attention[1].begin() + 4 * 5);
  EXPECT_EQ(pruned(trace, "r=0.3,alpha=0.2,broadcast=none"), "0/0/-1/2 0/0/-1/3 0/1/-1/1");
}

TEST(DualAttentionPruning, EffectAfterLeavesThePrefillAlone) {
  const RunResult within = run(five_tokens(), "hae:ddes=none,r=0.3,alpha=0.2");
  const RunResult after = run(five_tokens(), "hae:ddes=none,r=0.3,alpha=0.2,effect=after");
  EXPECT_EQ(brief(after.log), "0/0/-1/2 0/0/-1/3 0/1/-1/2 0/1/-1/3");
  EXPECT_EQ(within.prefill_tokens, 5 + 3);
  EXPECT_EQ(after.prefill_tokens, 5 + 5);
  EXPECT_EQ(after.prefill.rows, 0);
}

TEST(DualAttentionPruning, EveryLaneOfALayerLosesTheToken) {
  const std::vector<std::vector<float>> rows = {{1.0f}, {0.5f, 0.5f}, {0.5f, 0.0f, 0.5f}};
  const MemoryTrace trace = attention_trace({{rows, rows}, {rows, rows}}, 2, 3, {-1, 0, -1});
  // A_1 = 0 = A_V: 0 < r * 0 is false, so the threshold evicts nothing; give token 1 a little in head 0 of
  // layer 0.
  MemoryTrace uneven = trace;
  uneven.attention[0][2 * 3 + 0] = 0.375f;
  uneven.attention[0][2 * 3 + 1] = 0.125f;
  EXPECT_EQ(pruned(trace, "r=2,alpha=1,lane=kv_head"), "");
  EXPECT_EQ(pruned(uneven, "r=2,alpha=1,lane=kv_head"), "0/0/0/1 0/0/1/1 0/1/0/1w 0/1/1/1w");
}

TEST(DualAttentionPruning, MassEvictsInOrderWhileTheSumStaysWithinItsShare) {
  // A_V = 0.5; ascending: 2 (0.125), 3 (0.125), 1 (0.25). eps A_V = 0.25: 2 and 3 fit exactly (<=), 1 would
  // not.
  EXPECT_EQ(pruned(five_tokens(), "dap=mass,eps=0.5"), "0/0/-1/2 0/0/-1/3 0/1/-1/2w 0/1/-1/3w");
  EXPECT_EQ(pruned(five_tokens(), "dap=mass,eps=0.49"), "0/0/-1/2 0/1/-1/2w");
  EXPECT_EQ(pruned(five_tokens(), "dap=mass,eps=1"),
            "0/0/-1/1 0/0/-1/2 0/0/-1/3 0/1/-1/1w 0/1/-1/2w 0/1/-1/3w");
  // A skipped token (max_i a_ij >= alpha) adds nothing to the running sum.
  EXPECT_EQ(pruned(five_tokens(), "dap=mass,eps=1,alpha=0.2"), "0/0/-1/2 0/0/-1/3 0/1/-1/2w 0/1/-1/3w");
}

TEST(DualAttentionPruning, MassMayLoseEverythingWhateverSumsRoundTo) {
  // A = (0.5, 2^-54, 2^-54). In the order of positions both small ones are rounded away: A_V = 0.5. In the
  // order of eviction they add up first, and the three come to 0.5 + 2^-53.
  const std::vector<std::vector<float>> rows = {{1.0f},
                                                {0.5f, 0.5f},
                                                {0.5f, 0.25f, 0.25f},
                                                {0.25f, 0.25f, 0.25f, 0.25f},
                                                {0.5f, 0.5f, 0x1p-54f, 0x1p-54f, 0.0f}};
  const MemoryTrace trace = attention_trace({rows}, 5, {-1, 0, 0, 0, -1});
  EXPECT_EQ(pruned(trace, "dap=mass,eps=1"), "0/0/-1/1 0/0/-1/2 0/0/-1/3");
}

TEST(DualAttentionPruning, MassEvictsNothingWhereTextPaysNoAttention) {
  // A_V = 0, of which no share can be lost, though 0 <= eps * 0.
  const MemoryTrace trace = attention_trace({{{1.0f}, {0.5f, 0.5f}, {0.5f, 0.0f, 0.5f}}}, 3, {-1, 0, -1});
  const RunResult result = run(trace, "hae:ddes=none,dap=mass,eps=1");
  EXPECT_EQ(brief(result.log), "");
  EXPECT_THAT(result.warnings, Contains(HasSubstr("text pays no attention to the visual tokens")));
}

TEST(DualAttentionPruning, WithoutVisualTokensItIsANoOpAndSaysSo) {
  const MemoryTrace trace = attention_trace({{{1.0f}, {0.5f, 0.5f}}}, 2, {-1, -1});
  const RunResult result = run(trace, "hae:ddes=none");
  EXPECT_TRUE(result.log.entries.empty());
  EXPECT_THAT(result.warnings, Contains(HasSubstr("visual tokens: 0")));
}

TEST(DualAttentionPruning, WithoutTextQueriesAllVisualTokensStay) {
  const MemoryTrace trace = attention_trace({{{1.0f}, {0.5f, 0.5f}}}, 2, {0, 0});
  const RunResult result = run(trace, "hae:ddes=none,r=5,alpha=5");
  EXPECT_TRUE(result.log.entries.empty());
  EXPECT_THAT(result.warnings,
              Contains(HasSubstr("no text queries in the prompt, all 2 visual tokens kept")));
}

TEST(DualAttentionPruning, TokensThatNoTextRowSeesAreKeptAndCounted) {
  // The picture {1, 3} is interleaved with text; token 3 comes after the last text row, so it is no
  // candidate.
  const MemoryTrace trace = attention_trace(
      {{{1.0f}, {0.5f, 0.5f}, {0.5f, 0.25f, 0.25f}, {0.25f, 0.25f, 0.25f, 0.25f}}}, 4, {-1, 0, -1, 0});
  const RunResult result = run(trace, "hae:ddes=none,r=5,alpha=5");
  EXPECT_EQ(brief(result.log), "0/0/-1/1");
  EXPECT_THAT(result.warnings, Contains(HasSubstr("1 of 2 visual tokens are seen by no text row and kept")));
  EXPECT_THAT(result.warnings, Contains(HasSubstr("all 1 candidates evicted")));
}

}  // namespace
}  // namespace hae
