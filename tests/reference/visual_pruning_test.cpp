#include "reference/visual_pruning.hpp"

#include <gmock/gmock.h>

#include "reference/policies.hpp"
#include "testing/memory_trace.hpp"
#include "tests/support/policy_specs.hpp"

// FastV, SparseVLM and MustDrop by hand. Unless a test says otherwise its trace is prompt only.

namespace hae {
namespace {

using testing::attention_trace;
using testing::brief;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;
using testing::MemoryTrace;
using ::testing::Pair;
using testing::run;

using Matrix = std::vector<std::vector<float>>;

std::string evicted(const MemoryTrace& trace, const std::string& spec) {
  return brief(run(trace, spec).log);
}

std::vector<std::string> warnings(const MemoryTrace& trace, const std::string& spec) {
  return run(trace, spec).warnings;
}

/// Rows of `tokens` tokens that attend to themselves only.
Matrix selfish(std::size_t tokens) {
  Matrix rows;
  for (std::size_t i = 0; i < tokens; ++i) {
    rows.emplace_back(i + 1, 0.0f).back() = 1.0f;
  }
  return rows;
}

/// The same with some rows replaced.
Matrix selfish_but(std::size_t tokens,
                   const std::vector<std::pair<std::size_t, std::vector<float>>>& others) {
  Matrix rows = selfish(tokens);
  for (const auto& [i, row] : others) {
    rows[i] = row;
  }
  return rows;
}

// ---- FastV

/// Visual tokens 2 to 5 of 8. In layer 1 they get (.20, .02, .01, .02) from row 6 and (.01, .04, .02, .03)
/// from row 7; layer 0 orders them otherwise, and so do the layers after layer 1.
MemoryTrace two_readings() {
  const Matrix other =
      selfish_but(8, {{6, {0.5f, 0, 0, 0, 0.5f, 0, 0}}, {7, {0.5f, 0, 0, 0, 0.5f, 0, 0, 0}}});
  const Matrix scored = selfish_but(
      8, {{6, {0.75f, 0, 0.20f, 0.02f, 0.01f, 0.02f, 0}}, {7, {0.90f, 0, 0.01f, 0.04f, 0.02f, 0.03f, 0, 0}}});
  return attention_trace({other, scored, other, other}, 8, {-1, -1, 0, 0, 0, 0, -1, -1});
}

TEST(FastV, KeepsWhatTheLastPromptRowOfTheLayerBeforeAttendsToMost) {
  // {3, 5} stay at .04 and .03. Layers 0 and 1 keep all, and a token that stays keeps its position.
  EXPECT_EQ(evicted(two_readings(), "fastv:layer=2,keep=2"), "0/2/-1/2w 0/2/-1/4w 0/3/-1/2w 0/3/-1/4w");
}

TEST(FastV, TextMeanKeepsWhatTextAttendsToMost) {
  // Means .105, .030, .015, .025: {2, 3} stay.
  EXPECT_EQ(evicted(two_readings(), "fastv/text-mean:layer=2,keep=2"),
            "0/2/-1/4w 0/2/-1/5w 0/3/-1/4w 0/3/-1/5w");
}

TEST(FastV, LogsTheMeanOverHeadsAndRows) {
  // One row gives token 1 0.5 in one head and 0 in the other: 0.25.
  const MemoryTrace trace =
      attention_trace({{selfish_but(4, {{3, {0, 0.5f, 0.5f, 0}}}), selfish(4)}, {selfish(4), selfish(4)}}, 2,
                      4, {-1, 0, 0, -1});
  const RunResult result = run(trace, "fastv:layer=1,keep=1");
  EXPECT_EQ(brief(result.log), "0/1/-1/1w");
  EXPECT_EQ(result.log.entries.front().score, 0.25);
}

TEST(FastV, EvictsTheOlderOfTwoEqualScores) {
  const MemoryTrace trace = attention_trace(
      {selfish_but(5, {{4, {0, 0.25f, 0.25f, 0.25f, 0.25f}}}), selfish(5)}, 5, {-1, 0, 0, 0, -1});
  EXPECT_EQ(evicted(trace, "fastv:layer=1,keep=1"), "0/1/-1/1w 0/1/-1/2w");
}

TEST(FastV, ATextMeanIsOverTheRowsThatCanSeeTheToken) {
  // Text rows 2 and 4 see token 1 and give it 0.5 and 0: mean 0.25. Token 3, seen by row 4 alone, gets 0.375.
  const MemoryTrace trace =
      attention_trace({selfish_but(5, {{2, {0, 0.5f, 0.5f}}, {4, {0, 0, 0, 0.375f, 0.625f}}}), selfish(5)}, 5,
                      {-1, 0, -1, 1, -1});
  EXPECT_EQ(evicted(trace, "fastv/text-mean:layer=1,keep=1"), "0/1/-1/1w");
}

TEST(FastV, AShareRoundsDownOrAsTheOriginalDoes) {
  // Of 4 visual tokens; the last row of layer 0 pays token 1 the least and token 4 the most. By round half to
  // even 1.5 and 2.5 both become 2, 2.6 becomes 3, and 0.4 becomes 0.
  const MemoryTrace trace =
      attention_trace({selfish_but(6, {{5, {0.375f, 0, 0.0625f, 0.125f, 0.25f, 0.1875f}}}), selfish(6)}, 6,
                      {-1, 0, 0, 0, 0, -1});
  const auto kept = [&](const std::string& options) {
    return 4 - run(trace, "fastv:layer=1," + options).log.entries.size();
  };
  EXPECT_EQ(kept("keep=65%"), 2u);
  EXPECT_EQ(kept("keep=65%,rounding=original"), 3u);
  EXPECT_EQ(kept("keep=0.375"), 1u);
  EXPECT_EQ(kept("keep=0.375,rounding=original"), 2u);
  EXPECT_EQ(kept("keep=0.625,rounding=original"), 2u);
  EXPECT_EQ(kept("keep=10%"), 1u);
  EXPECT_EQ(kept("keep=10%,rounding=original"), 0u);
  EXPECT_EQ(kept("keep=9"), 4u);
  EXPECT_THAT(warnings(trace, "fastv:layer=1,keep=10%,rounding=original"),
              Contains(HasSubstr("all 4 candidates evicted")));
}

TEST(FastV, KeepsOfEachPictureOrOfAllTogether) {
  // Pictures [5, 9) and [12, 18) of 20 tokens, half of them kept. The last row pays each token of the first
  // picture 1/16 and tokens 12 .. 17 1/32, 1/64, 1/128, ... : of all together 5 .. 8 and 12 stay, of each 7,
  // 8 (the older of equal scores go) and 12, 13, 14.
  std::vector<Index> image(20, -1);
  std::fill(image.begin() + 5, image.begin() + 9, 0);
  std::fill(image.begin() + 12, image.begin() + 18, 1);
  std::vector<float> row(20, 0.0f);
  std::fill(row.begin() + 5, row.begin() + 9, 1.0f / 16);
  for (std::size_t j = 12; j < 18; ++j) {
    row[j] = 1.0f / static_cast<float>(32 << (j - 12));
  }
  for (std::size_t j = 1; j < 20; ++j) {
    row[0] -= row[j];
  }
  row[0] += 1.0f;
  const MemoryTrace trace = attention_trace({selfish_but(20, {{19, row}}), selfish(20)}, 20, image);
  EXPECT_EQ(evicted(trace, "fastv:layer=1,keep=50%"),
            "0/1/-1/13w 0/1/-1/14w 0/1/-1/15w 0/1/-1/16w 0/1/-1/17w");
  EXPECT_EQ(evicted(trace, "fastv:layer=1,keep=50%,scope=image"),
            "0/1/-1/5w 0/1/-1/6w 0/1/-1/15w 0/1/-1/16w 0/1/-1/17w");
  EXPECT_EQ(evicted(trace, "fastv:layer=1,keep=4,scope=image"), "0/1/-1/16w 0/1/-1/17w");
}

TEST(FastV, EffectAfterLeavesThePrefillAlone) {
  const RunResult after = run(two_readings(), "fastv:layer=2,keep=2,effect=after");
  EXPECT_EQ(brief(after.log), "0/2/-1/2 0/2/-1/4 0/3/-1/2 0/3/-1/4");
  EXPECT_EQ(after.prefill_tokens, 4 * 8);
  EXPECT_EQ(run(two_readings(), "fastv:layer=2,keep=2").prefill_tokens, 8 + 8 + 6 + 6);
}

TEST(FastV, KeepsTokensThatTheScoringRowCannotSee) {
  // A window of 4: row 4 sees 1 .. 4. Of the candidates 1 and 2 one stays; 0 is none of them.
  MemoryTrace trace =
      attention_trace({selfish_but(5, {{4, {0, 0.5f, 0.25f, 0, 0.25f}}}), selfish(5)}, 5, {0, 0, 0, -1, -1});
  trace.info.masks[0].window = 4;
  EXPECT_EQ(evicted(trace, "fastv:layer=1,keep=1"), "0/1/-1/2w");
  EXPECT_THAT(warnings(trace, "fastv:layer=1,keep=1"),
              Contains(HasSubstr("1 of 3 visual tokens are seen by none")));
}

TEST(FastV, NeedsOnlyTheRowsItScoresBy) {
  MemoryTrace trace = two_readings();
  trace.info.prompt_rows = {7};
  EXPECT_EQ(evicted(trace, "fastv:layer=2,keep=2"), evicted(two_readings(), "fastv:layer=2,keep=2"));
  EXPECT_THROW(run(trace, "fastv/text-mean:layer=2,keep=2"), NeedsError);
  trace.info.prompt_rows = {0, 1, 6, 7};
  EXPECT_EQ(evicted(trace, "fastv/text-mean:layer=2,keep=2"),
            evicted(two_readings(), "fastv/text-mean:layer=2,keep=2"));
}

TEST(FastV, RefusesALayerThatTheModelHasNot) {
  EXPECT_THROW(reference::make_policy("fastv:layer=0,keep=2"), ConfigError);
  EXPECT_THROW(reference::make_policy("fastv:keep=2,layer=1,rounding=original"), ConfigError);
  EXPECT_THROW(reference::make_policy("fastv"), ConfigError);
  EXPECT_THROW(reference::make_policy("fastv:keep=110%"), ConfigError);
  EXPECT_THROW(run(two_readings(), "fastv:layer=5,keep=2"), ConfigError);
  EXPECT_EQ(evicted(two_readings(), "fastv:layer=4,keep=2"), "");
  EXPECT_THAT(warnings(two_readings(), "fastv:layer=4,keep=2"),
              Contains(HasSubstr("nothing is pruned by layer 3 of a model of 4 layers")));
}

// ---- MustDrop

/// Five tokens: text, three of a picture, text. Row 4 is the only text row after the picture:
///   c = m = (1: 0.25, 2: 0.125, 3: 0.125), their sum 0.5
MemoryTrace five_tokens() {
  const Matrix rows = selfish_but(5, {{4, {0.25f, 0.25f, 0.125f, 0.125f, 0.25f}}});
  return attention_trace({rows, rows}, 5, {-1, 0, 0, 0, -1});
}

TEST(MustDrop, DropsWhatIsBelowBothThresholdsFromEveryLayer) {
  // tau_global * 0.5 = 0.15. Layer 1 never sees 2 and 3; layer 0 loses them after the prefill.
  EXPECT_EQ(evicted(five_tokens(), "mustdrop:layers=0,tau_global=0.3,tau_individual=0.2"),
            "0/0/-1/2 0/0/-1/3 0/1/-1/2w 0/1/-1/3w");
  for (const LogEntry& entry :
       run(five_tokens(), "mustdrop:layers=0,tau_global=0.3,tau_individual=0.2").log.entries) {
    EXPECT_EQ(entry.score, 0.125);
  }
}

TEST(MustDrop, BothComparisonsAreStrict) {
  // 0.25 * 0.5 = 0.125 = c_2 = c_3, and m_2 = m_3 = 0.125.
  EXPECT_EQ(evicted(five_tokens(), "mustdrop:layers=0,tau_global=0.25,tau_individual=0.2"), "");
  EXPECT_EQ(evicted(five_tokens(), "mustdrop:layers=0,tau_global=0.3,tau_individual=0.125"), "");
}

TEST(MustDrop, OneRowThatAttendsSparesATokenThatIsGloballyUnimportant) {
  // Rows 3 and 4 give token 1 (0.25, 0) and token 2 (0.5, 0.75): c = (0.25, 1.25), 0.2 * 1.5 = 0.3; m_1 =
  // 0.25.
  const Matrix rows = selfish_but(5, {{3, {0.25f, 0.25f, 0.5f, 0}}, {4, {0.25f, 0, 0.75f, 0, 0}}});
  const MemoryTrace trace = attention_trace({rows}, 5, {-1, 0, 0, -1, -1});
  EXPECT_EQ(evicted(trace, "mustdrop:layers=0,tau_global=0.2,tau_individual=0.25"), "");
  EXPECT_EQ(evicted(trace, "mustdrop:layers=0,tau_global=0.2,tau_individual=0.3"), "0/0/-1/1");
}

TEST(MustDrop, ALaterLayerFiltersWhatTheEarlierOnesLeft) {
  // Layer 0 pays (0.25, 0.1875, 0.0625), their sum 0.5: token 3 is at an eighth of it. Layer 1 pays (0.0625,
  // 0.1875, 0.25), and without 3 token 1 has a quarter of what is left, with it an eighth.
  const MemoryTrace trace =
      attention_trace({selfish_but(5, {{4, {0.25f, 0.25f, 0.1875f, 0.0625f, 0.25f}}}),
                       selfish_but(5, {{4, {0.25f, 0.0625f, 0.1875f, 0.25f, 0.25f}}}), selfish(5)},
                      5, {-1, 0, 0, 0, -1});
  EXPECT_EQ(evicted(trace, "mustdrop:layers=0/1,tau_global=0.2,tau_individual=1"),
            "0/0/-1/3 0/1/-1/3w 0/2/-1/3w");
  EXPECT_EQ(evicted(trace, "mustdrop:layers=0/1,tau_global=0.3,tau_individual=1"),
            "0/0/-1/1 0/0/-1/3 0/1/-1/1 0/1/-1/3w 0/2/-1/1w 0/2/-1/3w");
}

TEST(MustDrop, MayDropNothingOrEverything) {
  const std::string nothing = "mustdrop:layers=0,tau_global=0,tau_individual=0";
  const std::string all = "mustdrop:layers=0,tau_global=2,tau_individual=2";
  EXPECT_EQ(evicted(five_tokens(), nothing), "");
  EXPECT_THAT(warnings(five_tokens(), nothing), IsEmpty());
  EXPECT_EQ(evicted(five_tokens(), all), "0/0/-1/1 0/0/-1/2 0/0/-1/3 0/1/-1/1w 0/1/-1/2w 0/1/-1/3w");
  EXPECT_THAT(warnings(five_tokens(), all), Contains(HasSubstr("all 3 candidates evicted")));
}

TEST(MustDrop, HasThePublishedThresholdsOrBothOfItsOwn) {
  const auto options = [](const std::string& spec) { return reference::make_policy(spec)->options(); };
  EXPECT_THAT(options("mustdrop"),
              IsSupersetOf({Pair("tau_global", "0.001"), Pair("tau_individual", "0.001")}));
  EXPECT_THAT(options("mustdrop:target=128"),
              IsSupersetOf({Pair("tau_global", "0.0012"), Pair("tau_individual", "0.001")}));
  EXPECT_THAT(options("mustdrop:target=64"),
              IsSupersetOf({Pair("tau_global", "0.011"), Pair("tau_individual", "0.01")}));
  EXPECT_THROW(options("mustdrop:target=96"), ConfigError);
  EXPECT_THROW(options("mustdrop:tau_global=0.1"), ConfigError);
  EXPECT_THROW(options("mustdrop:tau_individual=0.1"), ConfigError);
  EXPECT_THROW(options("mustdrop:tau_global=0.1,tau_individual=0.1,target=64"), ConfigError);
  EXPECT_THROW(options("mustdrop:layers=2/2"), ConfigError);
  EXPECT_THROW(options("mustdrop:layers=2/"), ConfigError);
}

// ---- SparseVLM

/// Text 0, visual 1 .. 3, text 4 .. 6, four layers. Layer 0: rows 4 .. 6 give the picture 0.75, 0.125, 0.125,
/// so only 4 is above the mean of a third of them. In layers 1 and 2 rows 4 and 5 pay
///   row 4: (0.125, 0.25, 0.5), then (-, 0.5, 0.25)      row 5: (0.5, 0.125, 0.25), then (0.25, -, 0.125)
/// and row 6 token 1 all.
MemoryTrace seven_tokens() {
  const std::vector<float> six = {0, 1.0f, 0, 0, 0, 0, 0};
  return attention_trace(
      {selfish_but(7, {{4, {0, 0.25f, 0.25f, 0.25f, 0.25f}},
                       {5, {0, 0.125f, 0, 0, 0, 0.875f}},
                       {6, {0, 0, 0, 0.125f, 0, 0, 0.875f}}}),
       selfish_but(
           7, {{4, {0, 0.125f, 0.25f, 0.5f, 0.125f}}, {5, {0, 0.5f, 0.125f, 0.25f, 0, 0.125f}}, {6, six}}),
       selfish_but(7, {{4, {0, 0, 0.5f, 0.25f, 0.25f}}, {5, {0, 0.25f, 0, 0.125f, 0, 0.625f}}, {6, six}}),
       selfish(7)},
      7, {-1, 0, 0, 0, -1, -1, -1});
}

TEST(SparseVlm, RatersAreTheTextTokensAboveTheMeanOfLayerZero) {
  // Row 4 rates: layer 1 leaves {2, 3}, layer 2 leaves {2}.
  EXPECT_EQ(evicted(seven_tokens(), "sparsevlm:layers=1/2,keep=2/1"), "0/2/-1/1w 0/3/-1/1w 0/3/-1/3w");
}

TEST(SparseVlm, RatersByEmbeddingAreTheTextTokensAboveTheMeanOfTheSoftmax) {
  // exp(1) / (exp(1) + 2) = 0.58 is above a third: row 5 rates. Text token 0 is before the picture.
  MemoryTrace trace = seven_tokens();
  trace.info.has_embedding_similarity = true;
  trace.similarity = {100, 0, 1, 0, 100, 0, 1, 0, 100, 0, 1, 0};
  EXPECT_EQ(evicted(trace, "sparsevlm:raters=embedding,layers=1/2,keep=2/1"),
            "0/2/-1/2w 0/3/-1/2w 0/3/-1/3w");
  // Layer 0 may decide: row 5 pays (0.125, 0, 0) there, so 2 goes, the older of two.
  EXPECT_EQ(evicted(trace, "sparsevlm:raters=embedding,layers=0,keep=2"), "0/1/-1/2w 0/2/-1/2w 0/3/-1/2w");
}

TEST(SparseVlm, RatersByEmbeddingNeedATraceThatHasThem) {
  EXPECT_THROW(run(seven_tokens(), "sparsevlm:raters=embedding"), NeedsError);
  MemoryTrace recomputed = seven_tokens();
  recomputed.info.payload = Payload::qkv;
  recomputed.info.has_values = true;
  EXPECT_THROW(testing::run_closed(recomputed, "sparsevlm:raters=embedding", 0), NeedsError);
}

TEST(SparseVlm, LeavesOutAtLeastOneTokenInEveryDecidingLayer) {
  // k = min(300, n - 1), then min(200, n - 1): as with 2 and 1 above. From one token none is left.
  EXPECT_EQ(evicted(seven_tokens(), "sparsevlm:layers=1/2,keep=300/200"), "0/2/-1/1w 0/3/-1/1w 0/3/-1/3w");
  EXPECT_EQ(evicted(seven_tokens(), "sparsevlm:layers=1/2,keep=1/1"),
            "0/2/-1/1w 0/2/-1/2w 0/3/-1/1w 0/3/-1/2w 0/3/-1/3w");
  EXPECT_THAT(warnings(seven_tokens(), "sparsevlm:layers=1/2,keep=1/1"),
              Contains(HasSubstr("layer 2: all 1 candidates evicted")));
}

TEST(SparseVlm, AShareIsOfThePromptsVisualTokens) {
  // 67 % and 34 % of 3 are 2 and 1.
  EXPECT_EQ(evicted(seven_tokens(), "sparsevlm:layers=1/2,keep=67%/34%"),
            evicted(seven_tokens(), "sparsevlm:layers=1/2,keep=2/1"));
}

TEST(SparseVlm, WithoutRatersAllStayAndItSaysSo) {
  // One text row after the picture is never above the mean of itself.
  const MemoryTrace trace = attention_trace({selfish(3), selfish(3), selfish(3)}, 3, {-1, 0, -1});
  EXPECT_EQ(evicted(trace, "sparsevlm:layers=1,keep=1"), "");
  EXPECT_THAT(warnings(trace, "sparsevlm:layers=1,keep=1"),
              Contains(HasSubstr("no text token is above the mean")));
}

TEST(SparseVlm, HasThePublishedTables) {
  const auto keep = [](const std::string& options) {
    return reference::make_policy("sparsevlm:" + options)->options()[3];
  };
  EXPECT_THAT(keep("target=192"), Pair("keep", "300/200/110"));
  EXPECT_THAT(keep("target=96"), Pair("keep", "238/48/26"));
  EXPECT_THAT(keep("target=128,version=2"), Pair("keep", "238/108/60"));
  EXPECT_THROW(keep("target=100"), ConfigError);
  EXPECT_THROW(keep("target=64,keep=3/2/1"), ConfigError);
  EXPECT_THROW(keep("keep=3/2"), ConfigError);
  EXPECT_THROW(keep("keep=3/2/0"), ConfigError);
  EXPECT_THROW(keep("layers=0/1/2"), ConfigError);
}

// ---- all of them

const std::vector<std::string> kSpecs = {"fastv:layer=1,keep=1", "fastv/text-mean:layer=1,keep=1",
                                         "sparsevlm:layers=1,keep=1",
                                         "mustdrop:layers=0/1,tau_global=2,tau_individual=2"};

TEST(VisualPruning, WithoutVisualTokensItIsANoOpAndSaysSo) {
  const MemoryTrace trace = attention_trace({selfish(4), selfish(4), selfish(4)}, 4, {-1, -1, -1, -1});
  for (const std::string& spec : kSpecs) {
    EXPECT_EQ(evicted(trace, spec), "") << spec;
    EXPECT_THAT(warnings(trace, spec), ElementsAre(HasSubstr("visual tokens: 0"))) << spec;
  }
}

TEST(VisualPruning, WithoutTextAllVisualTokensStay) {
  const MemoryTrace trace = attention_trace({selfish(4), selfish(4), selfish(4)}, 4, {0, 0, 0, 0});
  for (const std::string& spec : kSpecs) {
    EXPECT_EQ(evicted(trace, spec), "") << spec;
    EXPECT_THAT(warnings(trace, spec), ElementsAre(HasSubstr("no text queries in the prompt, all 4")))
        << spec;
  }
}

TEST(VisualPruning, VisualTokensAfterAllTextStay) {
  // FastV's row is that of the last prompt token, a visual one here, which sees all.
  const MemoryTrace trace = attention_trace({selfish(4), selfish(4), selfish(4)}, 4, {-1, -1, 0, 0});
  for (std::size_t i = 1; i < kSpecs.size(); ++i) {
    EXPECT_EQ(evicted(trace, kSpecs[i]), "") << kSpecs[i];
    EXPECT_THAT(warnings(trace, kSpecs[i]), Contains(HasSubstr("2 of 2 visual tokens are seen by none")))
        << kSpecs[i];
  }
  EXPECT_EQ(evicted(trace, kSpecs[0]), "0/1/-1/2w 0/2/-1/2w");
}

TEST(VisualPruning, LayersThatAModelHasNotAreNamed) {
  EXPECT_THAT(warnings(seven_tokens(), "mustdrop"),
              ElementsAre(HasSubstr("by layer 6 of a model of 4 layers"), HasSubstr("by layer 10"),
                          HasSubstr("by layer 14")));
  EXPECT_THAT(warnings(seven_tokens(), "sparsevlm"),
              ElementsAre(HasSubstr("by layer 6"), HasSubstr("by layer 15")));
}

TEST(VisualPruning, NothingIsEvictedWhileDecoding) {
  // The trace's last two tokens are decoded.
  MemoryTrace trace = seven_tokens();
  trace.info.prompt = 5;
  trace.info.prompt_rows = {0, 1, 2, 3, 4};
  trace.info.generated = 3;
  const RunResult result = run(trace, "fastv:layer=1,keep=1");
  EXPECT_EQ(brief(result.log), "0/1/-1/1w 0/1/-1/2w 0/2/-1/1w 0/2/-1/2w 0/3/-1/1w 0/3/-1/2w");
  EXPECT_THAT(testing::residents(trace, result, 1, 0).back(), ElementsAre(0, 3, 4, 5, 6));
  EXPECT_THAT(testing::residents(trace, result, 0, 0).back(), ElementsAre(0, 1, 2, 3, 4, 5, 6));
}

}  // namespace
}  // namespace hae
