#include "analysis/foregone_attention.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
// RapidCheck needs GoogleTest first.
#include <rapidcheck/gtest.h>

#include <array>

#include "analysis/decay_envelope.hpp"
#include "reference/policies.hpp"
#include "testing/generators.hpp"
#include "testing/memory_trace.hpp"
#include "tests/support/interesting.hpp"
#include "tests/support/policy_specs.hpp"

namespace hae::analysis {
namespace {

using testing::attention_trace;
using ::testing::ElementsAre;
using testing::MemoryTrace;
using ::testing::Pair;

std::vector<ForegoneAttention> foregone(const MemoryTrace& trace, const RunResult& run,
                                        const ReplayOptions& options = {}) {
  testing::MemorySequence sequence(trace);
  ForegoneAttentionVisitor visitor(trace.info, run.lanes);
  walk_decode(sequence, run, options, "memory", std::array<DecodeVisitor*, 1>{&visitor});
  return visitor.take();
}

TEST(ForegoneAttention, IsWhatEvictedTokensWouldHaveReceived) {
  // P = 2, T = 5, a window of one token, no sink: token s leaves after step s. Rows of steps 1 to 3:
  //   (.25 .5 .25)  (.125 .25 .125 .5)  (.5 0 .25 .125 .125)
  // After the prefill 0 leaves: .25, .125, .5 at ages 1, 2, 3. After step 1 token 1: .25, 0. After step 2
  // token 2: .25. After step 3 token 3: nothing is left.
  const MemoryTrace trace = attention_trace({{{{1.0f},
                                               {0.5f, 0.5f},
                                               {0.25f, 0.5f, 0.25f},
                                               {0.125f, 0.25f, 0.125f, 0.5f},
                                               {0.5f, 0.0f, 0.25f, 0.125f, 0.125f}}}},
                                            2, {-1, -1, -1, -1, -1});
  const ForegoneAttention found = foregone(trace, testing::run(trace, "window:sinks=0,recent=1")).front();
  EXPECT_EQ(found.evictions, 4);
  EXPECT_EQ(found.flushes, 4);
  EXPECT_THAT(found.largest, ElementsAre(0.25, 0.125, 0.5));
  EXPECT_THAT(found.largest_sum, ElementsAre(0.25, 0.375, 0.875));
  EXPECT_THAT(found.by_flush,
              ElementsAre(Pair(Pair(1, 1), 0.25), Pair(Pair(1, 2), 0.125), Pair(Pair(1, 3), 0.5)));
  EXPECT_THAT(found.by_future, ElementsAre(Pair(1, 0.875)));
}

TEST(ForegoneAttention, CountsTokensThatLeaveTogetherAsOneFlush) {
  // The same rows, DDES with l = 1, D = 2 by score: 0 is kept (it leads by far), 1 is marked in step 1, 2 in
  // step 2, and both leave after step 2. In step 3 they would have received 0 and .25.
  const MemoryTrace trace = attention_trace({{{{1.0f},
                                               {1.0f, 0.0f},
                                               {0.75f, 0.0f, 0.25f},
                                               {0.5f, 0.25f, 0.125f, 0.125f},
                                               {0.5f, 0.0f, 0.25f, 0.125f, 0.125f}}}},
                                            2, {-1, -1, -1, -1, -1});
  const RunResult run = testing::run(trace, "hae:dap=none,budget=2,bin=2");
  ASSERT_EQ(testing::brief(run.log), "2/0/-1/1@1 2/0/-1/2@2");
  const ForegoneAttention found = foregone(trace, run).front();
  EXPECT_EQ(found.flushes, 1);
  EXPECT_THAT(found.by_flush, ElementsAre(Pair(Pair(2, 1), 0.25)));
  EXPECT_THAT(found.by_future, ElementsAre(Pair(2, 0.25)));
}

TEST(ForegoneAttention, OfLayersTogetherIsTheLargestOfEach) {
  ForegoneAttention found{.evictions = 2,
                          .flushes = 1,
                          .largest = {0.25},
                          .largest_sum = {0.25},
                          .by_flush = {{{2, 1}, 0.5}},
                          .by_future = {{2, 0.5}}};
  found += {.evictions = 3,
            .flushes = 2,
            .largest = {0.125, 0.5},
            .largest_sum = {0.125, 0.625},
            .by_flush = {{{1, 1}, 0.125}, {{2, 1}, 0.75}},
            .by_future = {{1, 0.625}, {2, 0.25}}};
  EXPECT_EQ(found.evictions, 5);
  EXPECT_EQ(found.flushes, 3);
  EXPECT_THAT(found.largest, ElementsAre(0.25, 0.5));
  EXPECT_THAT(found.largest_sum, ElementsAre(0.25, 0.625));
  EXPECT_THAT(found.by_flush, ElementsAre(Pair(Pair(1, 1), 0.125), Pair(Pair(2, 1), 0.75)));
  EXPECT_THAT(found.by_future, ElementsAre(Pair(1, 0.625), Pair(2, 0.5)));
}

TEST(DecayFindings, HoldEachLossToItsOwnBound) {
  // A = 1, λ = 1/2, three tokens that leave together and receive .25 and then .125 each. R1 for k = 1, 2:
  // 1/2 and 3/4, of which the first is nearer to .25 than the second to .375. R2: 3/2 at age 1, 3/4 at age 2.
  // R3: 3 (1/2)/(1/2). Bounds are rounded up by an ulp at most.
  const ForegoneAttention observed{.evictions = 3,
                                   .flushes = 1,
                                   .largest = {0.25, 0.125},
                                   .largest_sum = {0.25, 0.375},
                                   .by_flush = {{{3, 2}, 0.375}},
                                   .by_future = {{3, 1.125}}};
  const DecayFindings findings = decay_findings({1.0, 0.5}, observed);
  EXPECT_EQ(findings.summed_loss.measured, 0.25);
  EXPECT_NEAR(findings.summed_loss.bound, 0.5, 1e-15);
  EXPECT_EQ(findings.summed_loss.cases, 3);
  EXPECT_EQ(findings.flush_loss.measured, 0.375);
  EXPECT_NEAR(findings.flush_loss.bound, 0.75, 1e-15);
  EXPECT_EQ(findings.flush_loss.cases, 1);
  EXPECT_EQ(findings.future_loss.measured, 1.125);
  EXPECT_NEAR(findings.future_loss.bound, 3.0, 1e-15);
}

/// By the definition, from the run's log and the trace's rows: a_j(s + t) in [0, 1] of each log entry.
std::vector<std::vector<double>> received_by_entry(const MemoryTrace& trace, const RunResult& run) {
  const SequenceInfo& info = trace.info;
  std::vector<std::vector<double>> received;
  for (const LogEntry& entry : run.log.entries) {
    const bool by_head = run.lanes == LaneKind::kv_head;
    const Index first = by_head ? entry.lane * info.group_heads() : 0;
    const Index heads = by_head ? info.group_heads() : info.query_heads;
    std::vector<double>& ages = received.emplace_back();
    for (Index step = entry.step + 1; step <= info.steps(); ++step) {
      const Index query = info.prompt + step - 1;
      double total = 0.0;
      for (Index h = first; h < first + heads; ++h) {
        const float* row = trace.attention[at(entry.layer)].data() + (h * info.tokens + query) * info.tokens;
        double sum = 0.0;
        for (Index j = 0; j <= query; ++j) {
          sum += static_cast<double>(row[j]);
        }
        total += sum == 0.0 ? 0.0 : static_cast<double>(row[entry.token]) / sum;
      }
      ages.push_back(total / static_cast<double>(heads));
    }
  }
  return received;
}

TEST(ForegoneAttentionProperty, IsTheLargestOfEachByTheDefinition) {
  testing::check_interesting("foregone attention", 0.3, [] {
    const MemoryTrace trace = *testing::attention_traces();
    const std::string spec = *testing::policy_specs(trace.info);
    const std::optional<RunResult> run = testing::possible_run(trace, spec);
    if (!run || run->merges) {
      return false;
    }
    ReplayOptions options;
    options.block_rows = *rc::gen::inRange<Index>(1, 9);
    ForegoneAttention all;
    for (const ForegoneAttention& layer : foregone(trace, *run, options)) {
      all += layer;
    }
    const std::vector<std::vector<double>> received = received_by_entry(trace, *run);
    std::vector<double> largest(at(trace.info.steps()), 0.0);
    std::vector<double> sums(largest);
    double future = 0.0;
    for (const std::vector<double>& ages : received) {
      double sum = 0.0;
      for (std::size_t i = 0; i < ages.size(); ++i) {
        sum += ages[i];
        largest[i] = std::max(largest[i], ages[i]);
        sums[i] = std::max(sums[i], sum);
      }
      future += sum;
    }
    RC_ASSERT(all.evictions == std::ssize(run->log.entries));
    // The canonical sum is of float32, the definition's of double.
    const auto near = [](double a, double b) { return std::abs(a - b) <= 1e-5 * (1.0 + b); };
    for (std::size_t i = 0; i < largest.size() && all.evictions > 0; ++i) {
      RC_ASSERT(near(all.largest[i], largest[i]));
      RC_ASSERT(near(all.largest_sum[i], sums[i]));
    }
    // R1, R2 and R3 hold with the envelope that was fitted to the same run.
    const std::optional<Decay> decay = decay_envelope(all.largest);
    if (decay) {
      const DecayFindings findings = decay_findings(*decay, all);
      RC_ASSERT(findings.summed_loss.holds());
      RC_ASSERT(findings.flush_loss.holds());
      RC_ASSERT(findings.future_loss.holds());
      RC_ASSERT(findings.future_loss.cases == all.flushes);
      // A decay that is too small for what was seen meets no premise.
      const Decay smaller{decay->initial / 2.0, decay->rate};
      RC_ASSERT(decay_findings(smaller, all).future_loss.verdict() == Verdict::does_not_apply);
    }
    return decay.has_value() && future > 0.0;
  });
}

}  // namespace
}  // namespace hae::analysis
