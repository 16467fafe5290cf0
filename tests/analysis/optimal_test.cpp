#include "analysis/optimal.hpp"

#include <gtest/gtest.h>
// RapidCheck needs GoogleTest first.
#include <rapidcheck/gtest.h>

#include <algorithm>

#include "reference/policies.hpp"
#include "testing/generators.hpp"
#include "testing/memory_trace.hpp"
#include "tests/support/interesting.hpp"
#include "tests/support/policy_specs.hpp"

namespace hae::analysis {
namespace {

using testing::attention_trace;
using testing::MemoryTrace;

std::vector<std::optional<double>> totals(const MemoryTrace& trace, const std::vector<RunResult>& runs) {
  testing::MemorySequence sequence(trace);
  return optimal_totals(sequence, runs, {}, "memory");
}

double rounding(const SequenceInfo& info) {
  return static_cast<double>(info.layers * info.query_heads * info.steps()) * optimal_rounding(info.tokens);
}

// P = 2, T = 4, a budget of two residents at each attention (greedy with budget 1): one of {0, 1} leaves
// before step 1, one of {0, 1, 2} that are left before step 2.
//   row of step 1: (0.25, 0.5, 0.25), row of step 2: (0.5, 0, 0.25, 0.25).
// Losses: evict 0 at once: 0.25 + 0.5, then 1: 0 or 2: 0.25. Evict 1 at once: 0.5 + 0, then 0: 0.5 or 2:
// 0.25. The least is 0.75, twice: {0, 1} or {1, 2}. Greedy by scores (1.5, 0.5) takes 1, then by (1.75, -,
// 0.25) token 2, which is optimal too; the window takes 0, then 1, as well.
TEST(Optimal, IsTheLeastLossByHand) {
  const MemoryTrace trace = attention_trace(
      {{{{1.0f}, {0.5f, 0.5f}, {0.25f, 0.5f, 0.25f}, {0.5f, 0.0f, 0.25f, 0.25f}}}}, 2, {-1, -1, -1, -1});
  const std::vector<RunResult> runs = testing::run_all(
      trace, {"greedy:budget=1,recent=0", "window:sinks=0,recent=1", "random:budget=1,seed=1", "full"});
  const std::vector<std::optional<double>> optimal = totals(trace, runs);
  EXPECT_EQ(optimal[0], 0.75);
  EXPECT_EQ(optimal[1], 0.75);
  EXPECT_EQ(optimal[2], 0.75);
  EXPECT_EQ(optimal[3], 0.0);
}

// A token that is not looked at now and will be later is worth a place: P = 2, T = 5, two residents at each
// attention. Token 0 gets 0, 0 and then 0.75; everything else goes as it comes.
//   rows: (0, 0.5, 0.5), (0, 0, 0.5, 0.5), (0.75, 0, 0, 0, 0.25)
// Keeping 0: 1 is missed in step 1 (0.5), 2 in step 2 (0.5), nothing in step 3: 1. Evicting 0 first misses
// 0.75 later, and step 2 and 3 have room for one other token each: 1 goes before step 2 (0), then 2 (0):
// 0.75.
TEST(Optimal, WeighsWhatIsStillToCome) {
  const MemoryTrace trace = attention_trace({{{{1.0f},
                                               {0.5f, 0.5f},
                                               {0.0f, 0.5f, 0.5f},
                                               {0.0f, 0.0f, 0.5f, 0.5f},
                                               {0.75f, 0.0f, 0.0f, 0.0f, 0.25f}}}},
                                            2, {-1, -1, -1, -1, -1});
  EXPECT_EQ(totals(trace, testing::run_all(trace, {"window:sinks=0,recent=1"})).front(), 0.75);
}

// One step of two heads, (0, .5, .5) and (.75, .125, .125), before which one of {0, 1} leaves. Of the layer 1
// does and costs .5 + .125; alone, head 0 loses 0 and head 1 loses .125.
TEST(Optimal, OfALayerAndOfItsHeadsAreFoundInOneSearch) {
  const MemoryTrace trace = attention_trace(
      {{{{1.0f}, {0.5f, 0.5f}, {0.0f, 0.5f, 0.5f}}, {{1.0f}, {0.5f, 0.5f}, {0.75f, 0.125f, 0.125f}}}}, 2, 2,
      {-1, -1, -1});
  const std::vector<std::optional<double>> optimal = totals(
      trace, testing::run_all(trace, {"greedy:budget=1,recent=0", "greedy:budget=1,recent=0,lane=kv_head"}));
  EXPECT_EQ(optimal[0], 0.625);
  EXPECT_EQ(optimal[1], 0.125);
}

TEST(Optimal, IsAbsentWithoutDecodeStepsAndWhereTheSearchIsTooLarge) {
  const MemoryTrace prompt = attention_trace({{{{1.0f}, {0.5f, 0.5f}}}}, 2, {-1, -1});
  EXPECT_EQ(totals(prompt, testing::run_all(prompt, {"full"})).front(), std::nullopt);

  MemoryTrace huge =
      prompt;  // 2 lanes * 9,999 steps * 10,000 tokens * 8 bytes = 1.6 GB; nothing of it is read
  huge.info.tokens = 10'000;
  huge.info.prompt = 1;
  EXPECT_EQ(totals(huge, std::vector<RunResult>(1)).front(), std::nullopt);
}

TEST(Optimal, IsNeverBeatenByAPolicyOfTheTable) {
  testing::check_interesting("no policy beats the optimum", 0.3, [] {
    const MemoryTrace trace = *rc::gen::oneOf(testing::attention_traces(), testing::qkv_traces());
    std::vector<RunResult> runs;
    for (int i = 0; i < 3; ++i) {
      try {
        runs.push_back(testing::run(trace, *testing::policy_specs(trace.info)));
      } catch (const ConfigError&) {
        // A drawn protection can exceed a small prompt's budget.
      }
    }
    RC_PRE(!runs.empty());
    const std::vector<std::optional<double>> optimal = totals(trace, runs);
    bool is_interesting = false;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      RC_ASSERT(optimal[i].has_value() == (trace.info.steps() > 0));
      if (optimal[i]) {
        const double total = missed_mass_total(runs[i].decode);
        RC_ASSERT(*optimal[i] >= 0.0);
        RC_ASSERT(total - *optimal[i] >= -rounding(trace.info));
        is_interesting = is_interesting || total > *optimal[i] + rounding(trace.info);
      }
    }
    return is_interesting;
  });
}

/// The least loss of one lane by trying everything: at each step, every choice of who leaves.
///
/// mass  [steps][T] attention of the step's row, summed over the lane's heads
class Exhaustive {
 public:
  Exhaustive(std::vector<std::vector<double>> mass, Index prompt, std::vector<Index> residents)
      : mass_(std::move(mass)), prompt_(prompt), residents_(std::move(residents)) {}

  double least() {
    std::vector<bool> here(static_cast<std::size_t>(prompt_), true);
    return leave(here, 0, 0);
  }

 private:
  /// Loss from the attention of step `step` + 1 on, when tokens from `first` on may still leave before it.
  double leave(std::vector<bool> here, std::size_t step, std::size_t first) {
    const Index now = std::count(here.begin(), here.end(), true);
    if (now + 1 == residents_[step]) {
      return attend(std::move(here), step);
    }
    double best = 1e300;
    for (std::size_t token = first; token < here.size(); ++token) {
      if (here[token]) {
        std::vector<bool> without = here;
        without[token] = false;
        best = std::min(best, leave(std::move(without), step, token + 1));
      }
    }
    return best;
  }

  double attend(std::vector<bool> here, std::size_t step) {
    here.push_back(true);
    double missed = 0.0;
    for (std::size_t token = 0; token < here.size(); ++token) {
      missed += here[token] ? 0.0 : mass_[step][token];
    }
    return step + 1 == residents_.size() ? missed : missed + leave(std::move(here), step + 1, 0);
  }

  std::vector<std::vector<double>> mass_;
  Index prompt_;
  std::vector<Index> residents_;
};

/// Attention in double of the decode rows of one lane.
std::vector<std::vector<double>> plain_mass(const MemoryTrace& trace, Index layer, Index first_head,
                                            Index heads) {
  const SequenceInfo& info = trace.info;
  std::vector<std::vector<double>> mass;
  for (Index query = info.prompt; query < info.tokens; ++query) {
    std::vector<double>& row = mass.emplace_back(static_cast<std::size_t>(info.tokens), 0.0);
    for (Index head = first_head; head < first_head + heads; ++head) {
      const float* w = trace.attention[static_cast<std::size_t>(layer)].data() +
                       (head * info.tokens + query) * info.tokens;
      double all = 0.0;
      for (Index j = 0; j <= query; ++j) {
        all += static_cast<double>(w[j]);
      }
      for (Index j = 0; all > 0.0 && j <= query; ++j) {
        row[static_cast<std::size_t>(j)] += static_cast<double>(w[j]) / all;
      }
    }
  }
  return mass;
}

TEST(Optimal, IsTheLeastOfAllEvictionsOfTheseSizes) {
  testing::check_interesting("exhaustive search", 0.3, [] {
    testing::TraceBounds bounds;
    bounds.least_tokens = 2;
    bounds.most_tokens = 8;
    bounds.most_layers = 2;
    const MemoryTrace trace = *testing::attention_traces(bounds);
    const SequenceInfo& info = trace.info;
    RC_PRE(info.steps() > 0 &&
           std::ranges::all_of(info.masks, [](const MaskRule& m) { return m == MaskRule{}; }));
    const std::string spec = *rc::gen::element<std::string>(
        "greedy:budget=2,lane=kv_head,recent=0", "greedy:budget=1,recent=0",
        "hae:dap=none,budget=2,bin=2,recent=0", "hae:r=0.5,alpha=2,budget=2,bin=3,recent=0",
        "window:sinks=1,recent=1", "random:budget=2");
    const RunResult run = testing::run(trace, spec);
    const Index lanes = lane_count(info, run.lanes);
    const Index heads = info.query_heads / lanes;
    double expected = 0.0;
    for (Index layer = 0; layer < info.layers; ++layer) {
      for (Index lane = 0; lane < lanes; ++lane) {
        const auto sizes = run.attention_tokens.begin() + (layer * lanes + lane) * info.steps();
        expected += Exhaustive(plain_mass(trace, layer, lane * heads, heads), info.prompt,
                               {sizes, sizes + info.steps()})
                        .least();
      }
    }
    const double optimal = *totals(trace, {run}).front();
    RC_ASSERT(std::abs(optimal - expected) <= rounding(info));
    return expected > 0.0;
  });
}

}  // namespace
}  // namespace hae::analysis
