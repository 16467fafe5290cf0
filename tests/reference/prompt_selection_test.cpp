#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "reference/mean_rotation.hpp"
#include "reference/policies.hpp"
#include "testing/memory_trace.hpp"
#include "tests/support/policy_specs.hpp"

// Policies that decide once, at the end of the prefill.

namespace hae {
namespace {

using testing::attention_trace;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::MemoryTrace;
using testing::run;
using Row = std::vector<float>;

/// One layer, a prompt of as many tokens as the last row has; the rows before it are masked.
MemoryTrace last_row_trace(const std::vector<Row>& last_row_by_head, Index kv_heads) {
  const std::size_t prompt = last_row_by_head.front().size();
  std::vector<std::vector<Row>> heads;
  for (const Row& last : last_row_by_head) {
    std::vector<Row> rows(prompt - 1);
    rows.push_back(last);
    heads.push_back(rows);
  }
  return attention_trace({heads}, kv_heads, static_cast<Index>(prompt), std::vector<Index>(prompt, -1));
}

/// One layer of one head whose keys are given; its queries are zeros and its values the keys.
MemoryTrace key_trace(const std::vector<Row>& keys, const std::vector<Index>& image, Index layers = 1) {
  const auto prompt = static_cast<Index>(keys.size());
  const auto head_dim = static_cast<Index>(keys.front().size());
  MemoryTrace trace = attention_trace(std::vector(at(layers), std::vector<Row>(keys.size())), prompt, image);
  trace.attention.clear();
  trace.info.payload = Payload::qkv;
  trace.info.head_dim = head_dim;
  trace.info.has_values = true;
  std::vector<float> flat;
  for (const Row& key : keys) {
    flat.insert(flat.end(), key.begin(), key.end());
  }
  for (Index layer = 0; layer < layers; ++layer) {
    trace.queries.emplace_back(flat.size(), 0.0f);
    trace.keys.push_back(flat);
    trace.values.push_back(flat);
  }
  return trace;
}

std::vector<Index> evicted(const RunResult& result, Index lane = 0) {
  std::vector<Index> tokens;
  for (const LogEntry& entry : result.log.entries) {
    if (entry.lane == lane) {
      tokens.push_back(entry.token);
    }
  }
  return tokens;
}

TEST(Snapkv, PoolsWhatTheLastRowsLookAt) {
  // Last row 2/16, 4/16, 1/16, 5/16 over the candidates. Of the two best without pooling, 3 and 1, the others
  // go.
  const MemoryTrace trace = last_row_trace({{0.125f, 0.25f, 0.0625f, 0.3125f, 0.25f}}, 1);
  EXPECT_THAT(evicted(run(trace, "snapkv:budget=3,window=1,kernel=1")), ElementsAre(0, 2));
  // Sums of three neighbours, zeros outside: 6/16, 7/16, 10/16, 6/16: 2 and 1 stay.
  EXPECT_THAT(evicted(run(trace, "snapkv:budget=3,window=1,kernel=3")), ElementsAre(0, 3));
  // Maxima: 4, 4, 5, 5 sixteenths: 2 and 3 stay.
  EXPECT_THAT(evicted(run(trace, "snapkv:budget=3,window=1,kernel=3,pool=max")), ElementsAre(0, 1));
}

TEST(Snapkv, SumsTheRowsOfItsWindowAndKvpressTakesTheirMean) {
  // Rows 3 and 4 give 0 .75 and 1 and 2 .375 each.
  const MemoryTrace trace = attention_trace({{{1.0f},
                                              {0.0f, 1.0f},
                                              {0.0f, 0.0f, 1.0f},
                                              {0.25f, 0.25f, 0.25f, 0.25f},
                                              {0.5f, 0.125f, 0.125f, 0.125f, 0.125f}}},
                                            5, std::vector<Index>(5, -1));
  const RunResult sums = run(trace, "snapkv:budget=3,window=2,kernel=1");
  const RunResult means = run(trace, "snapkv/kvpress:budget=3,window=2,kernel=1");
  EXPECT_THAT(evicted(sums), ElementsAre(1, 2));
  EXPECT_EQ(sums.log.entries[0].score, 0.375);
  EXPECT_EQ(means.log.entries[0].score, 0.1875);
}

TEST(Snapkv, PoolsEachHeadBeforeItsGroupAndAdakvTheGroup) {
  // Maxima of three neighbours by head: .5 .5 .25 .25 and 0 .5 .5 .5, of which 1 has the largest mean. The
  // means are .25 0 .25 .25, all .25 when pooled: of equal ones the newest stays.
  const MemoryTrace trace = last_row_trace({{0.5f, 0, 0, 0.25f, 0.25f}, {0, 0, 0.5f, 0.25f, 0.25f}}, 1);
  EXPECT_THAT(evicted(run(trace, "snapkv:budget=2,window=1,kernel=3,pool=max")), ElementsAre(0, 2, 3));
  EXPECT_THAT(evicted(run(trace, "adakv:budget=2,window=1,kernel=3,floor=0")), ElementsAre(0, 1, 2));
}

TEST(Snapkv, ReducesTheHeadsOfAGroup) {
  // max: .5 .3125 .25, of which 0 stays; mean: .25 .3125 .125, of which 1 does.
  const MemoryTrace trace = last_row_trace({{0.5f, 0.3125f, 0, 0.1875f}, {0, 0.3125f, 0.25f, 0.4375f}}, 1);
  EXPECT_THAT(evicted(run(trace, "snapkv:budget=2,window=1,kernel=1,group=max")), ElementsAre(1, 2));
  EXPECT_THAT(evicted(run(trace, "snapkv:budget=2,window=1,kernel=1")), ElementsAre(0, 2));
  const RunResult sum = run(trace, "snapkv:budget=2,window=1,kernel=1,group=sum");
  EXPECT_EQ(sum.log.entries[0].score, 0.5);
  EXPECT_EQ(sum.log.entries[1].score, 0.25);
}

TEST(Snapkv, EachKvHeadHasAGroupOfItsOwn) {
  // Heads 0 and 1 read KV head 0, heads 2 and 3 KV head 1. The mean of heads 1 and 2 would keep token 0.
  const Row low = {0.75f, 0, 0, 0.25f};
  const Row middle = {0, 0.5f, 0.25f, 0.25f};
  const RunResult result =
      run(last_row_trace({low, low, middle, middle}, 2), "snapkv:budget=2,window=1,kernel=1");
  EXPECT_THAT(evicted(result, 0), ElementsAre(1, 2));
  EXPECT_THAT(evicted(result, 1), ElementsAre(0, 2));
}

TEST(Snapkv, TiesNeverTakeTheWindow) {
  // Tokens 0 .. 5 score the same; the window {6, 7} is not ranked. Of the equal ones the four oldest go.
  std::vector<Row> rows;
  for (std::size_t i = 1; i <= 8; ++i) {
    rows.emplace_back(i, 1.0f / static_cast<float>(i));
  }
  const MemoryTrace trace = attention_trace({rows}, 8, std::vector<Index>(8, -1));
  for (const char* policy : {"snapkv", "snapkv/kvpress", "h2o/prefill-window", "pyramidkv", "adakv"}) {
    const std::string spec = std::string(policy) + ":budget=4,window=2";
    const std::vector<Index> gone = evicted(run(trace, spec));
    EXPECT_TRUE(std::ranges::none_of(gone, [](Index token) { return token >= 6; })) << spec;
    EXPECT_EQ(gone.size(), 4u) << spec;
  }
  EXPECT_THAT(evicted(run(trace, "snapkv:budget=4,window=2,kernel=1")), ElementsAre(0, 1, 2, 3));
}

TEST(Snapkv, AWindowAboveTheBudgetIsImpossible) {
  const MemoryTrace trace = last_row_trace({{0.5f, 0.25f, 0.25f}}, 1);
  EXPECT_THROW(run(trace, "snapkv:budget=2,window=3"), ConfigError);
  EXPECT_THROW(run(trace, "snapkv:budget=2,window=1,kernel=2"), ConfigError);
}

TEST(Snapkv, NeedsTheLastPromptRowsOnly) {
  MemoryTrace trace = last_row_trace({{0.5f, 0.25f, 0.25f}}, 1);
  trace.info.prompt_rows = {2};
  EXPECT_NO_THROW(run(trace, "snapkv:budget=2,window=1"));
  EXPECT_THROW(run(trace, "snapkv:budget=2,window=2"), NeedsError);
}

TEST(H2oObservedMean, QueryHeadsReadTheirKvHead) {
  // Heads 0 and 1 read KV head 0: means .55, .35, .10; heads 2 and 3 read KV head 1: .10, .15, .75. Divided
  // by the 3, 2 and 1 rows from the token on: .183, .175, .1 and .033, .075, .75.
  const MemoryTrace trace =
      last_row_trace({{0.6f, 0.3f, 0.1f}, {0.5f, 0.4f, 0.1f}, {0.1f, 0.2f, 0.7f}, {0.1f, 0.1f, 0.8f}}, 2);
  const RunResult result = run(trace, "h2o/observed-mean:budget=1");
  EXPECT_THAT(evicted(result, 0), ElementsAre(1, 2));
  EXPECT_THAT(evicted(result, 1), ElementsAre(0, 1));
  EXPECT_THAT(result.final_tokens, ElementsAre(1, 1));
}

TEST(H2oObservedMean, DividesByTheRowsThatCouldSeeTheToken) {
  // Over 3, 2 and 1 rows .1667 .0625 .375: 2 stays, whose sum is not the largest.
  const MemoryTrace trace = last_row_trace({{0.5f, 0.125f, 0.375f}}, 1);
  EXPECT_THAT(evicted(run(trace, "h2o/observed-mean:budget=1")), ElementsAre(0, 1));
}

TEST(H2oObservedMean, AShareRoundsDownAndKeepsOneToken) {
  std::vector<Row> rows;
  for (std::size_t i = 1; i <= 10; ++i) {
    rows.emplace_back(i, 1.0f / static_cast<float>(i));
  }
  const MemoryTrace trace = attention_trace({rows}, 10, std::vector<Index>(10, -1));
  EXPECT_THAT(run(trace, "h2o/observed-mean:budget=0.1").final_tokens, ElementsAre(1));
  EXPECT_THAT(run(trace, "h2o/observed-mean:budget=1%").final_tokens, ElementsAre(1));
  EXPECT_THAT(run(trace, "h2o/observed-mean:budget=39%").final_tokens, ElementsAre(3));
  EXPECT_THAT(run(trace, "h2o/observed-mean:budget=100%").final_tokens, ElementsAre(10));
  EXPECT_THROW(reference::make_policy("h2o/observed-mean:budget=0"), ConfigError);
  EXPECT_THROW(reference::make_policy("h2o/observed-mean:budget=101%"), ConfigError);
}

/// Tokens beside the window that all layers together keep of a long prompt.
Index kept_beside_window(const std::string& spec, Index budget, Index window, Index layers) {
  SequenceInfo info;
  info.layers = layers;
  info.query_heads = info.kv_heads = 1;
  info.prompt = 5000;
  info.tokens = 5001;
  info.masks.resize(at(layers));
  info.image.assign(5001, -1);
  const auto policy = reference::make_policy(spec + ":window=" + std::to_string(window));
  Index total = 0;
  for (Index layer = 0; layer < layers; ++layer) {
    total += policy->sizes(info, layer, budget, info.prompt)->total - 1 - window;  // one step, its own token
  }
  return total;
}

TEST(Pyramidkv, WholeSteps) {
  // cap 128, w 8: b = 120, least 6, most 234, step ⌊228/31⌋ = 7: 32·234 - 7·496 = 4016, 4.6 % above 32·120.
  EXPECT_EQ(kept_beside_window("pyramidkv", 128, 8, 32), 4016);
  // cap 128, w 32: b = 96, least 4, most 188, step ⌊184/31⌋ = 5: 32·188 - 5·496 = 3536, 15.1 % above 32·96.
  EXPECT_EQ(kept_beside_window("pyramidkv", 128, 32, 32), 3536);
  EXPECT_EQ(kept_beside_window("snapkv", 128, 8, 32), 32 * 120);
}

TEST(Pyramidkv, FallsWhereThePromptIsTwiceTheBudget) {
  // N = 20 = 2b with b = 12 - 2. least = ⌊10/20⌋ = 0 and most = 20 exceed the N - w = 18 tokens beside the
  // window, so most = 18 and least = 2, over two layers.
  SequenceInfo info;
  info.layers = 2;
  info.query_heads = info.kv_heads = 1;
  info.prompt = 20;
  info.tokens = 21;
  info.masks.resize(2);
  info.image.assign(21, -1);
  const auto policy = reference::make_policy("pyramidkv:window=2");
  // At the one step the window and the step's own token are there too.
  EXPECT_EQ(policy->sizes(info, 0, 12, 20)->total, 18 + 2 + 1);
  EXPECT_EQ(policy->sizes(info, 1, 12, 20)->total, 2 + 2 + 1);
}

TEST(Adakv, HeadsShareTheirBudget) {
  // B = 2 beside the last token. Of both heads' scores the four largest are .4, .25, .21 of head 1 and .2 of
  // head 0 (among equal ones the newest, token 3).
  const MemoryTrace trace =
      last_row_trace({{0.2f, 0.2f, 0.2f, 0.2f, 0.2f}, {0.4f, 0.25f, 0.21f, 0.04f, 0.1f}}, 2);
  const RunResult shared = run(trace, "adakv:budget=3,window=1,kernel=1,floor=0");
  EXPECT_THAT(evicted(shared, 0), ElementsAre(0, 1, 2));
  EXPECT_THAT(evicted(shared, 1), ElementsAre(3));
  EXPECT_EQ(shared.limits[0].budget, 2);
  EXPECT_EQ(shared.limits[1].budget, 4);
  // floor 1/2: ⌊2/2⌋ = 1 and 1/2 of 1 and 3 more: 1.5 and 2.5, both 2 by rounding half to even.
  const RunResult floored = run(trace, "adakv:budget=3,window=1,kernel=1,floor=0.5");
  EXPECT_THAT(floored.final_tokens, ElementsAre(3, 3));
}

TEST(Adakv, OfEqualScoresTheNewerTokenAndThenTheHigherHeadCounts) {
  // Of the two largest scores one is .5 of head 0; the other is .25, which both heads have.
  const std::string spec = "adakv:budget=2,window=1,kernel=1,floor=0";
  const auto tokens = [&](const Row& first, const Row& second) {
    return run(last_row_trace({first, second}, 2), spec).final_tokens;
  };
  EXPECT_THAT(tokens({0.5f, 0.25f, 0, 0.25f}, {0, 0, 0.25f, 0.75f}), ElementsAre(2, 2));
  EXPECT_THAT(tokens({0.5f, 0, 0.25f, 0.25f}, {0, 0.25f, 0, 0.75f}), ElementsAre(3, 1));
  EXPECT_THAT(tokens({0.5f, 0, 0.25f, 0.25f}, {0, 0, 0.25f, 0.75f}), ElementsAre(2, 2));
}

TEST(Knorm, KeepsTheLowestNorms) {
  const MemoryTrace trace = key_trace({{3.0f}, {-1.0f}, {2.0f}, {0.5f}}, {-1, -1, -1, -1});
  EXPECT_THAT(evicted(run(trace, "knorm:budget=2")), ElementsAre(0, 2));
}

TEST(Keydiff, KeepsTheKeysLeastLikeTheMean) {
  // The mean direction is (3/4, 1/4): the cosine of (1, 0) with it is .95, that of (0, 1) .32.
  const MemoryTrace trace = key_trace({{1, 0}, {2, 0}, {0, 1}, {1, 0}}, {-1, -1, -1, -1});
  EXPECT_THAT(evicted(run(trace, "keydiff:budget=2")), ElementsAre(0, 1));
}

TEST(Keydiff, AttentionAloneIsNotEnough) {
  EXPECT_THROW(run(last_row_trace({{0.5f, 0.5f}}, 1), "keydiff:budget=1"), NeedsError);
}

/// Two dimensions; queries before rotary embedding beside the keys.
MemoryTrace expected_trace(const std::vector<Row>& keys, const std::vector<float>& unrotated,
                           double frequency) {
  MemoryTrace trace = key_trace(keys, std::vector<Index>(keys.size(), -1));
  trace.unrotated_queries = {unrotated};
  trace.info.rotary = Rotary{{frequency}, false};
  return trace;
}

TEST(ExpectedAttention, WeighsValuesByTheAttentionOfTheMeanQuery) {
  // Frequency 0: nothing turns. Every query is (√2, 0), so there is no covariance and z = k_x. Keys (0, 8),
  // (ln 2, 1) and (ln 4, 1): probabilities 1/7, 2/7, 4/7, lengths 8, 1.22 and 1.71: scores 1.14, .35, .98.
  const float root = std::sqrt(2.0f);
  const MemoryTrace trace =
      expected_trace({{0, 8}, {std::log(2.0f), 1}, {std::log(4.0f), 1}}, {root, 0, root, 0, root, 0}, 0.0);
  EXPECT_THAT(evicted(run(trace, "expected-attention:budget=1,sinks=0")), ElementsAre(1, 2));
  EXPECT_THAT(evicted(run(trace, "expected-attention:budget=2,sinks=0")), ElementsAre(1));
  EXPECT_THAT(evicted(run(trace, "expected-attention:budget=2,sinks=2")), ElementsAre(2));
}

TEST(ExpectedAttention, SpreadOfQueriesCountsForBothSigns) {
  // Queries ±(2, 0): mean 0, covariance 4 along x, z = 4 x²/(2·2) = x². Keys of one length along x, and along
  // y.
  const MemoryTrace trace =
      expected_trace({{0, 1}, {-1, 0}, {0, -1}, {1, 0}}, {2, 0, -2, 0, 2, 0, -2, 0}, 0.0);
  EXPECT_THAT(evicted(run(trace, "expected-attention:budget=2,sinks=0")), ElementsAre(0, 2));
}

TEST(ExpectedAttention, WeighsTheSpreadOfQueriesAgainstTheirMean) {
  // Queries (-1.5√2 ± 2, 0): mean -1.5√2 and variance 4 along x, so z of (1, 0) is -1.5√2/√2 + 4/(2·2) = -.5,
  // below the 0 of (0, 1).
  const float mean = -1.5f * std::sqrt(2.0f);
  const MemoryTrace trace = expected_trace({{0, 1}, {1, 0}}, {mean - 2, 0, mean + 2, 0}, 0.0);
  EXPECT_THAT(evicted(run(trace, "expected-attention:budget=1,sinks=0")), ElementsAre(1));
}

TEST(ExpectedAttention, TurnsQueriesToTheMeanOfThePositionsToCome) {
  // Frequency π/2, positions 3 and 4 (future=2): turns of 3π/2 and 2π, cosine (0 + 1)/2, sine (-1 + 0)/2. The
  // query (1, 0) becomes (.5, -.5): of keys of one length, (1, 0) and (0, -1) look alike, (0, 1) less.
  const double quarter = 1.5707963267948966;
  const MemoryTrace trace = expected_trace({{0, 1}, {0, -1}, {1, 0}}, {1, 0, 1, 0, 1, 0}, quarter);
  EXPECT_THAT(evicted(run(trace, "expected-attention:budget=2,sinks=0,future=2")), ElementsAre(0));
}

TEST(ExpectedAttention, NeedsQueriesBeforeRotaryEmbedding) {
  EXPECT_THROW(run(key_trace({{1, 0}, {0, 1}}, {-1, -1}), "expected-attention:budget=1,sinks=0"), NeedsError);
}

TEST(MeanRotation, TurnsLikeTheMathematicsLibrary) {
  for (const double angle : {0.0, 1.0, -1.0, 0.7853981633974483, 3.141592653589793, 100.0, 12345.678, 1e6}) {
    const reference::Turn turn = reference::turn_of(angle);
    EXPECT_NEAR(turn.cosine, std::cos(angle), 0x1p-48) << angle;
    EXPECT_NEAR(turn.sine, std::sin(angle), 0x1p-48) << angle;
  }
}

TEST(Lookm, AllTextStays) {
  // Text 0, 3, 4 and picture 1, 2; the last token is recent. A budget of 2 still holds the text 0, 3 before
  // it.
  const MemoryTrace trace = key_trace({{1}, {1}, {1}, {1}, {1}}, {-1, 0, 0, -1, -1});
  EXPECT_THAT(evicted(run(trace, "lookm:budget=2,recent=1")), ElementsAre(1, 2));
  // hh = 3 of the four before the last: one picture token goes, of equal ones... token 1 got more sums: 2
  // goes.
  EXPECT_THAT(evicted(run(trace, "lookm:budget=4,recent=1")), ElementsAre(2));
}

TEST(Lookm, MergesIntoTheMostSimilarKey) {
  // Both picture keys point where text 3's does; text 0 and 4 point elsewhere.
  const MemoryTrace trace = key_trace({{0, 1}, {2, 0}, {3, 0}, {1, 0}, {0, 1}}, {-1, 0, 0, -1, -1});
  const auto merges = [&](const std::string& how) {
    std::vector<Merge> found;
    for (const LogEntry& entry : run(trace, "lookm:budget=2,recent=1,merge=" + how).log.entries) {
      found.push_back(entry.merge.value());
    }
    return found;
  };
  const double third = 1.0 / 3.0;
  EXPECT_THAT(merges("mean"), ElementsAre(Merge{3, third, third, 1.0}, Merge{3, third, third, 1.0}));
  // The cosines are 1.
  EXPECT_EQ(merges("weighted"), merges("mean"));
  // (k + (k + k_1)/2 + (k + k_2)/2) / 3
  EXPECT_THAT(merges("pivot"),
              ElementsAre(Merge{3, 2.0 / 3.0, 0.5 / 3.0, 1.0}, Merge{3, 2.0 / 3.0, 0.5 / 3.0, 1.0}));
}

TEST(TomeDecoder, MergesTheMostSimilarPairInAllLayers) {
  // Picture tokens 1 .. 4; A = {1, 3} and B = {2, 4}. Token 1 matches 4, 3 matches 2, both exactly: the newer
  // goes.
  const MemoryTrace trace =
      key_trace({{5, 5}, {1, 0}, {0, 1}, {0, 1}, {1, 0}, {5, 5}}, {-1, 0, 0, 0, 0, -1}, 2);
  const RunResult result = run(trace, "tome/decoder:keep=3");
  ASSERT_EQ(result.log.entries.size(), 2u);
  for (const LogEntry& entry : result.log.entries) {
    EXPECT_EQ(entry.token, 3);
    EXPECT_EQ(entry.within, entry.layer == 1);
    EXPECT_EQ(entry.merge, (Merge{2, 0.5, 0.5, 2.0}));
  }
}

TEST(TomeDecoder, MergesIntoTheNewestOfEquallySimilarKeys) {
  // All equal, A = {1, 3} and B = {2, 4}: both of A go into 4.
  const MemoryTrace trace = key_trace({{1}, {1}, {1}, {1}, {1}, {1}}, {-1, 0, 0, 0, 0, -1});
  const RunResult result = run(trace, "tome/decoder:keep=2");
  EXPECT_THAT(evicted(result, kLayerLane), ElementsAre(1, 3));
  for (const LogEntry& entry : result.log.entries) {
    EXPECT_EQ(entry.merge, (Merge{4, 1.0 / 3.0, 1.0 / 3.0, 3.0}));
  }
}

TEST(TomeDecoder, RoundsMergeUntilFewEnoughAreLeft) {
  // All equal: round one merges 1 and 3 into the newest of B, 4; round two merges 2 into 4: four in one.
  const MemoryTrace trace = key_trace({{1}, {1}, {1}, {1}, {1}, {1}}, {-1, 0, 0, 0, 0, -1});
  const RunResult result = run(trace, "tome/decoder:keep=1");
  EXPECT_THAT(evicted(result, kLayerLane), ElementsAre(1, 2, 3));
  for (const LogEntry& entry : result.log.entries) {
    EXPECT_EQ(entry.merge, (Merge{4, 0.25, 0.25, 4.0}));
  }
  EXPECT_THAT(run(key_trace({{1}, {1}}, {-1, -1}), "tome/decoder:keep=1").log.entries, IsEmpty());
}

}  // namespace
}  // namespace hae
