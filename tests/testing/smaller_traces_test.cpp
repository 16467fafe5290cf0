#include "testing/smaller_traces.hpp"

#include <gmock/gmock.h>
// RapidCheck needs GoogleTest first.
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <sstream>

#include "sim/logged_policy.hpp"
#include "testing/generators.hpp"

namespace hae::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Text, a picture of two tokens, text; then two decode steps.
MemoryTrace six_tokens() {
  return attention_trace({{{1},
                           {0.25f, 0.75f},
                           {0.5f, 0.25f, 0.25f},
                           {0, 0, 0.5f, 0.5f},
                           {0, 0, 0, 0, 1},
                           {0.5f, 0.125f, 0.125f, 0.125f, 0.0625f, 0.0625f}}},
                         4, {-1, 0, 0, -1, -1, -1});
}

TEST(SmallerTraces, KeepWhatTheyKeep) {
  // Without token 2. Row 3 has 0 0 . ½ left of 0 0 ½ ½, which is 0 0 1; row 5 ½ ⅛ . ⅛ 1/16 1/16, which is
  // 7/8.
  const MemoryTrace smaller = with_tokens(six_tokens(), {0, 1, 3, 4, 5});
  EXPECT_EQ(smaller.info.tokens, 5);
  EXPECT_EQ(smaller.info.prompt, 3);
  EXPECT_EQ(smaller.info.steps(), 2);
  EXPECT_THAT(smaller.info.image, ElementsAre(-1, 0, -1, -1, -1));
  EXPECT_THAT(smaller.info.prompt_rows, ElementsAre(0, 1, 2));
  EXPECT_THAT(smaller.attention.front(), ElementsAre(1, 0, 0, 0, 0,          //
                                                     0.25f, 0.75f, 0, 0, 0,  //
                                                     0, 0, 1, 0, 0,          //
                                                     0, 0, 0, 1, 0,          //
                                                     4.0f / 7, 1.0f / 7, 1.0f / 7, 0.5f / 7, 0.5f / 7));
}

TEST(SmallerTraces, ARowThatKeepsNothingOfItsOwnAttendsToItselfAndAMaskedOneStaysMasked) {
  const MemoryTrace trace = attention_trace({{{1}, {1, 0}, {0, 0, 0}}}, 1, {-1, -1, -1});
  // The first token that is kept is of the prompt.
  EXPECT_THROW(with_tokens(trace, {1, 2}), ContractViolation);
  const MemoryTrace wider = attention_trace({{{1}, {0, 1}, {0, 1, 0}, {0, 0, 0, 0}}}, 2, {-1, -1, -1, -1});
  EXPECT_THAT(with_tokens(wider, {0, 2, 3}).attention.front(), ElementsAre(1, 0, 0, 0, 1, 0, 0, 0, 0));
}

TEST(SmallerTraces, PrintWhatTheyAreWhenTheyAreSmall) {
  std::ostringstream text;
  text << six_tokens();
  EXPECT_THAT(text.str(), HasSubstr("attention: 1 layers, 1 query heads, 1 KV heads, P 4, T 6"));
  EXPECT_THAT(text.str(), HasSubstr("image -1 0 0 -1 -1 -1"));
  EXPECT_THAT(text.str(), HasSubstr("\n  attention, head 0, token 2: 0.5 0.25 0.25 0 0 0\n"));
}

/// What shrinking lowers: while one of these falls and none rises it comes to an end.
std::array<Index, 6> sizes(const MemoryTrace& trace) {
  const SequenceInfo& info = trace.info;
  Index broken = 0;
  for (const auto* layers : {&trace.queries, &trace.keys, &trace.values}) {
    for (const std::vector<float>& layer : *layers) {
      broken += std::ranges::count_if(layer, [](float x) { return std::trunc(x) != x; });
    }
  }
  return {info.tokens,
          info.layers,
          info.query_heads,
          std::ranges::count_if(info.image, [](Index image) { return image >= 0; }),
          std::ranges::count_if(info.masks, [](const MaskRule& mask) { return mask != MaskRule{}; }),
          broken};
}

RC_GTEST_PROP(SmallerTraces, AreSoundAndSmaller, ()) {
  TraceBounds bounds;
  bounds.unrotated_queries = bounds.embedding_similarity = true;
  const MemoryTrace trace = *rc::gen::oneOf(attention_traces(bounds), qkv_traces(bounds));
  for (const MemoryTrace& smaller : smaller_traces(trace)) {
    const auto before = sizes(trace);
    const auto after = sizes(smaller);
    RC_ASSERT(after != before);
    RC_ASSERT(std::ranges::equal(after, before, std::less_equal{}));
    // The engine checks the info, and that each row sums to 1.
    (void)run(smaller, logged_policy({"log", {}, "no log", LaneKind::layer, {}}));
  }
}

}  // namespace
}  // namespace hae::testing
