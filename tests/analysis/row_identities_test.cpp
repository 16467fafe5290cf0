#include "analysis/row_identities.hpp"

#include <gmock/gmock.h>

#include <array>

#include "testing/memory_trace.hpp"
#include "tests/support/policy_specs.hpp"

namespace hae::analysis {
namespace {

using testing::attention_trace;
using testing::MemoryTrace;

RowFindings findings(const MemoryTrace& trace, const std::string& spec) {
  testing::MemorySequence sequence(trace);
  RowIdentitiesVisitor visitor(trace.info);
  walk_decode(sequence, testing::run(trace, spec), {}, "memory", std::array<DecodeVisitor*, 1>{&visitor});
  return visitor.take();
}

TEST(RowIdentities, LookAtWhatARowSeesAndWhatIsLeftOfIt) {
  // P = 2, T = 3. Token 0 leaves after the prefill, so that the one row (.25 .5 .25) misses .25.
  const MemoryTrace trace = attention_trace({{{1.0f}, {0.5f, 0.5f}, {0.25f, 0.5f, 0.25f}}}, 2, {-1, -1, -1});
  const RowFindings found = findings(trace, "window:sinks=0,recent=1");
  EXPECT_NEAR(found[0].measured, 0.25, found[0].rounding);  // a sum of quotients
  EXPECT_EQ(found[0].bound, 0.25);
  EXPECT_EQ(found[0].cases, 1);
  EXPECT_THAT(found[2].unmet, "the trace has no values");
}

TEST(RowIdentities, LookAtSoManyStepsOfALongSequence) {
  std::vector<std::vector<float>> identity;
  const Index tokens = kMostRowSteps + 8;
  for (Index i = 0; i < tokens; ++i) {
    identity.emplace_back(at(i + 1), 0.0f).back() = 1.0f;
  }
  const auto cases = [&](Index prompt) {
    const MemoryTrace trace =
        attention_trace({{identity, identity}}, 2, prompt, std::vector<Index>(at(tokens), -1));
    return findings(trace, "full")[0].cases;
  };
  // One finding a query head and step: of 3 more steps than are looked at, of as many, and of one fewer.
  EXPECT_EQ(cases(5), 2 * kMostRowSteps);
  EXPECT_EQ(cases(8), 2 * kMostRowSteps);
  EXPECT_EQ(cases(9), 2 * (kMostRowSteps - 1));
}

TEST(RowIdentities, SayNothingWithoutADecodeRow) {
  const MemoryTrace trace = attention_trace({{{1.0f}, {0.5f, 0.5f}}}, 2, {-1, -1});
  EXPECT_EQ(findings(trace, "full")[0].unmet, "there is no decode row");
}

}  // namespace
}  // namespace hae::analysis
