#include "analysis/attention_statistics.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "testing/memory_trace.hpp"

namespace hae::analysis {
namespace {

using testing::attention_trace;
using testing::MemoryTrace;

std::vector<AttentionStatistics> described(const MemoryTrace& trace, StatisticsOptions options = {}) {
  testing::MemorySequence sequence(trace);
  return attention_statistics(sequence, options, "memory");
}

const std::vector<AgedAttention>& age(const AttentionStatistics& layer, KeyKind kind) {
  return layer.age[static_cast<std::size_t>(kind)];
}

// Two heads; tokens: text 0, visual 1, visual 2, text 3 | generated 4, 5. All numbers are exact in float32.
//
//   row  head 0                            head 1
//   0    1                                 1
//   1    0.5  0.5                          1    0
//   2    0.25 0.25 0.5                     0.5  0.5  0
//   3    0.5  0.25 0    0.25               0.25 0.25 0.25 0.25
//   4    0.5  0    0.25 0    0.25          (masked)
//   5    0    0.25 0    0.25 0.25 0.25     0.5  0    0    0    0    0.5
MemoryTrace two_heads() {
  return attention_trace({{{{1.0f},
                            {0.5f, 0.5f},
                            {0.25f, 0.25f, 0.5f},
                            {0.5f, 0.25f, 0.0f, 0.25f},
                            {0.5f, 0.0f, 0.25f, 0.0f, 0.25f},
                            {0.0f, 0.25f, 0.0f, 0.25f, 0.25f, 0.25f}},
                           {{1.0f},
                            {1.0f, 0.0f},
                            {0.5f, 0.5f, 0.0f},
                            {0.25f, 0.25f, 0.25f, 0.25f},
                            {},
                            {0.5f, 0.0f, 0.0f, 0.0f, 0.0f, 0.5f}}}},
                         1, 4, {-1, 0, 0, -1, -1, -1});
}

TEST(AttentionStatistics, CountProbabilitiesAtMostTheThresholdByHand) {
  const AttentionStatistics layer = described(two_heads()).front();
  // Prompt rows, keys 1 and 2 of both heads: (0.5), (0.25, 0.5), (0.25, 0); (0), (0.5, 0), (0.25, 0.25).
  EXPECT_EQ(layer.prefill.visual.probabilities, 10);
  EXPECT_EQ(layer.prefill.visual.sparse, 3);
  // Keys 0 and 3: 4 + 1 a head, none of them 0.
  EXPECT_EQ(layer.prefill.text.probabilities, 10);
  EXPECT_EQ(layer.prefill.text.sparse, 0);
  EXPECT_EQ(layer.prefill.all().share(), 3.0 / 20.0);
  // Decode rows, keys 1 and 2: (0, 0.25), (0.25, 0); head 1 without its masked row: (0, 0).
  EXPECT_EQ(layer.decode.visual.probabilities, 6);
  EXPECT_EQ(layer.decode.visual.sparse, 4);
  // Other keys: (0.5, 0, 0.25), (0, 0.25, 0.25, 0.25); (0.5, 0, 0, 0.5).
  EXPECT_EQ(layer.decode.text.probabilities, 11);
  EXPECT_EQ(layer.decode.text.sparse, 4);
  EXPECT_EQ(layer.masked_rows, 1);
}

TEST(AttentionStatistics, TheThresholdItselfIsSparse) {
  const MemoryTrace trace = two_heads();
  // 0.25 of rows 3, key 1, and of row 2, key 1, in head 0; both visual keys of row 3 in head 1; and the
  // zeros.
  EXPECT_EQ(described(trace, {.threshold = 0.25}).front().prefill.visual.sparse, 7);
  EXPECT_EQ(described(trace, {.threshold = std::nextafter(0.25, 0.0)}).front().prefill.visual.sparse, 3);
}

TEST(AttentionStatistics, ColumnSumsAreOfTextRowsAndTheirVarianceIsThePopulations) {
  const AttentionStatistics layer = described(two_heads()).front();
  // Text rows 0 and 3, means of both heads: row 0: (1); row 3: (0.375, 0.25, 0.125, 0.25).
  // Visual: (0.25, 0.125): mean 0.1875, variance 0.0625² = 0.00390625.
  ASSERT_TRUE(layer.visual_columns);
  EXPECT_EQ(layer.visual_columns->tokens, 2);
  EXPECT_EQ(layer.visual_columns->mean, 0.1875);
  EXPECT_EQ(layer.visual_columns->variance, 0.00390625);
  // Text: (1.375, 0.25): mean 0.8125, variance 0.5625² = 0.31640625.
  ASSERT_TRUE(layer.text_columns);
  EXPECT_EQ(layer.text_columns->tokens, 2);
  EXPECT_EQ(layer.text_columns->mean, 0.8125);
  EXPECT_EQ(layer.text_columns->variance, 0.31640625);
}

TEST(AttentionStatistics, AgesAreStepsSinceATokenWasWritten) {
  const AttentionStatistics layer = described(two_heads()).front();
  // Bins 0, 1, 2, 3-4, 5-8; row 4 of head 0, and row 5 of both heads.
  const std::vector<AgedAttention>& visual = age(layer, KeyKind::visual);
  ASSERT_EQ(visual.size(), 5u);
  // Key 2 at age 2 (row 4) and 3 (row 5), key 1 at 3 and 4: 0.25 | 0, 0.25, 0 and head 1's zeros.
  EXPECT_EQ(visual[2].probabilities, 1);
  EXPECT_EQ(visual[2].mean(), 0.25);
  EXPECT_EQ(visual[3].probabilities, 5);
  EXPECT_EQ(visual[3].mean(), 0.25 / 5);
  EXPECT_EQ(visual[0].mean(), std::nullopt);
  const std::vector<AgedAttention>& text = age(layer, KeyKind::prompt_text);
  // Key 3 at age 1 and 2: 0 | 0.25, 0. Key 0 at age 4 and 5: 0.5 | 0, 0.5.
  EXPECT_EQ(text[1].mean(), 0.0);
  EXPECT_EQ(text[2].mean(), 0.125);
  EXPECT_EQ(text[3].mean(), 0.5);
  EXPECT_EQ(text[4].mean(), 0.25);
  const std::vector<AgedAttention>& generated = age(layer, KeyKind::generated);
  // Own: 0.25, 0.25, 0.5; the one before, of row 5: 0.25, 0.
  EXPECT_EQ(generated[0].sum, 1.0);
  EXPECT_EQ(generated[0].probabilities, 3);
  EXPECT_EQ(generated[1].mean(), 0.125);
}

TEST(AttentionStatistics, BinsDoubleAndTouch) {
  // 0 | 1 | 2 | 3 4 | 5 .. 8 | 9 .. 16
  const std::vector<Index> bins = {0, 1, 2, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5, 6};
  for (Index a = 0; a < static_cast<Index>(bins.size()); ++a) {
    EXPECT_EQ(age_bin(a), bins[static_cast<std::size_t>(a)]) << a;
  }
  for (Index bin = 0; bin < 40; ++bin) {
    const Range ages = ages_of_bin(bin);
    EXPECT_EQ(age_bin(ages.begin), bin);
    EXPECT_EQ(age_bin(ages.end - 1), bin);
    EXPECT_EQ(ages_of_bin(bin + 1).begin, ages.end);
  }
}

TEST(AttentionStatistics, AWindowTakesKeysOutOfEveryPopulation) {
  MemoryTrace trace = attention_trace(
      {{{{1.0f}, {0.5f, 0.5f}, {0.0f, 0.5f, 0.5f}, {0.0f, 0.0f, 0.5f, 0.5f}}}}, 2, {0, -1, -1, -1});
  trace.info.masks[0].window = 2;
  const AttentionStatistics layer = described(trace).front();
  EXPECT_EQ(layer.decode.visual.probabilities, 0);
  EXPECT_EQ(layer.decode.visual.share(), std::nullopt);
  EXPECT_EQ(layer.decode.text.probabilities, 4);
  EXPECT_EQ(layer.decode.text.sparse, 0);
}

TEST(AttentionStatistics, AVisualTokenThatNoTextRowSeesHasNoColumnSum) {
  // Token 0 is the only text row, and both pictures come after it.
  const AttentionStatistics layer =
      described(attention_trace({{{{1.0f}, {0.5f, 0.5f}, {0.5f, 0.25f, 0.25f}}}}, 3, {-1, 0, 0})).front();
  EXPECT_FALSE(layer.visual_columns);
  ASSERT_TRUE(layer.text_columns);
  EXPECT_EQ(layer.text_columns->tokens, 1);
  EXPECT_EQ(layer.text_columns->variance, 0.0);
}

TEST(AttentionStatistics, OnlyStoredPromptRowsCount) {
  MemoryTrace trace = two_heads();
  trace.info.prompt_rows = {3};
  const AttentionStatistics layer = described(trace).front();
  EXPECT_EQ(layer.prefill.all().probabilities, 8);
  EXPECT_EQ(layer.visual_columns->mean, 0.1875);  // row 0 sees no visual token
  EXPECT_EQ(layer.text_columns->mean, 0.3125);    // (0.375 + 0.25) / 2
  trace.info.prompt_rows = {};
  const AttentionStatistics none = described(trace).front();
  EXPECT_EQ(none.prefill.all().share(), std::nullopt);
  EXPECT_FALSE(none.visual_columns);
  EXPECT_FALSE(none.text_columns);
  EXPECT_EQ(none.decode.visual.sparse, 4);
}

TEST(AttentionStatistics, OverLayersPoolsCountsAndAveragesColumns) {
  // Layer 1 looks at token 1 alone: its text row 2 gives (0, 1, 0), layer 0's (0.5, 0.25, 0.25).
  const std::vector<AttentionStatistics> layers = described(attention_trace(
      {{{1.0f}, {0.5f, 0.5f}, {0.5f, 0.25f, 0.25f}}, {{1.0f}, {0.0f, 1.0f}, {0.0f, 1.0f, 0.0f}}}, 3,
      {-1, 0, -1}));
  const AttentionStatistics all = over_layers(layers);
  EXPECT_EQ(all.prefill.all().probabilities, 12);
  EXPECT_EQ(all.prefill.text.sparse, 3);
  EXPECT_EQ(all.visual_columns->mean, (0.25 + 1.0) / 2);
  // Text: layer 0 (1.5, 0.25), variance 0.625²; layer 1 (1, 0), variance 0.5².
  EXPECT_EQ(all.text_columns->variance, (0.625 * 0.625 + 0.5 * 0.5) / 2);
}

TEST(AttentionStatistics, OverLayersAddsUpEachPopulation) {
  AttentionStatistics layer;
  layer.prefill.visual = {.sparse = 1, .probabilities = 2};
  layer.prefill.text = {.sparse = 3, .probabilities = 5};
  layer.decode.visual = {.sparse = 7, .probabilities = 11};
  layer.decode.text = {.sparse = 13, .probabilities = 17};
  const AttentionStatistics all = over_layers(std::vector{layer, layer});
  EXPECT_EQ(all.prefill.visual.sparse, 2);
  EXPECT_EQ(all.prefill.text.sparse, 6);
  EXPECT_EQ(all.decode.visual.sparse, 14);
  EXPECT_EQ(all.decode.text.sparse, 26);
  EXPECT_EQ(all.prefill.visual.probabilities, 4);
  EXPECT_EQ(all.prefill.text.probabilities, 10);
  EXPECT_EQ(all.decode.visual.probabilities, 22);
  EXPECT_EQ(all.decode.text.probabilities, 34);
}

}  // namespace
}  // namespace hae::analysis
