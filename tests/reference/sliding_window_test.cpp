#include "reference/sliding_window.hpp"

#include <gmock/gmock.h>

#include "testing/memory_trace.hpp"
#include "tests/support/policy_specs.hpp"

namespace hae {
namespace {

using reference::capped_at_window;
using testing::attention_trace;
using testing::MemoryTrace;
using testing::run;

TEST(SlidingWindow, CapsABudgetThatExceedsIt) {
  // The newest four of W = 4 are all that a row sees.
  const Limits expected = {.recent = 4, .budget = 4, .capacity = 4};
  EXPECT_EQ(capped_at_window({.recent = 1, .budget = 5, .capacity = 5}, 5, 1, 4), expected);
  EXPECT_EQ(capped_at_window({.recent = 1, .budget = 4, .capacity = 4}, 4, 1, 4), std::nullopt);
}

TEST(SlidingWindow, ASinkTakesThePlaceOfOneToken) {
  // Two sinks and the newest three; the next row sees itself and three before it.
  const Limits expected = {.sinks = 2, .recent = 3, .budget = 5, .capacity = 5, .grows = true};
  EXPECT_EQ(capped_at_window({.sinks = 2, .budget = 6, .capacity = 6, .grows = true}, 6, 1, 4), expected);
  EXPECT_EQ(capped_at_window({.sinks = 2, .budget = 5, .capacity = 5, .grows = true}, 5, 1, 4), std::nullopt);
}

TEST(SlidingWindow, CapsTheBudgetThatLanesShare) {
  // Three lanes of four tokens hold twelve.
  EXPECT_EQ(capped_at_window({}, 12, 3, 4), std::nullopt);
  EXPECT_EQ(capped_at_window({}, 13, 3, 4), (Limits{.recent = 4, .budget = 4, .capacity = 4}));
}

TEST(SlidingWindow, AddsUpTheBudgetsOfALayersLanes) {
  // Every token sees itself alone. Two lanes of four tokens exceed two windows of three, though one lane's
  // four do not; two lanes of three are within them, and go by their scores.
  std::vector<std::vector<float>> identity;
  for (std::size_t i = 0; i < 6; ++i) {
    identity.emplace_back(i + 1, 0.0f).back() = 1.0f;
  }
  MemoryTrace trace = attention_trace({{identity, identity}}, 2, 5, std::vector<Index>(6, -1));
  trace.info.masks[0].window = 3;
  const RunResult capped = run(trace, "h2o/layerwise:budget=4,recent=1");
  EXPECT_EQ(capped.limits[0].budget, 3);
  EXPECT_EQ(capped.limits[1].budget, 3);
  EXPECT_FALSE(capped.log.entries[0].score.has_value());
  EXPECT_TRUE(run(trace, "h2o/layerwise:budget=3,recent=1").log.entries[0].score.has_value());
}

}  // namespace
}  // namespace hae
