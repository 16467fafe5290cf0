#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "sim/logged_policy.hpp"
#include "testing/memory_trace.hpp"

// Runs that merge what they evict: their rows are formed over merged keys and values, and only their outputs
// are measured.

namespace hae {
namespace {

using ::testing::HasSubstr;
using testing::MemoryTrace;

constexpr double kSmall = 1e-6;  // float32 weights, a few operations on numbers below 10

/// `layers` layers of one head of one dimension, P = 3, T = 5, all queries 1, scale 1. Keys are logits.
MemoryTrace merge_trace(Index layers, const std::vector<float>& keys, const std::vector<float>& values) {
  const std::vector<std::vector<float>> rows = {{1.0f}, {}, {}, {}, {}};
  MemoryTrace trace = testing::attention_trace(std::vector(at(layers), rows), 3, {-1, -1, -1, -1, -1});
  trace.attention.clear();
  trace.info.payload = Payload::qkv;
  trace.info.head_dim = 1;
  trace.info.scale = 1.0;
  trace.info.has_values = true;
  for (Index layer = 0; layer < layers; ++layer) {
    trace.queries.emplace_back(5, 1.0f);
    trace.keys.push_back(keys);
    trace.values.push_back(values);
  }
  return trace;
}

RunResult drive(const MemoryTrace& trace, EvictionLog log) {
  testing::MemorySequence sequence(trace);
  return replay(sequence, {logged_policy({"log", {}, "run.h5", LaneKind::layer, std::move(log)})}, {},
                "memory")
      .front();
}

LogEntry merged(Index layer, Index token, const Merge& merge, bool within = false) {
  return {0, layer, kLayerLane, token, within, {}, {}, merge};
}

double output_error(RunResult run, Index layer, Index step) {
  return run.decode.at(Metric::output_error, layer, 0, step - 1);
}

TEST(Merge, AMergedKeyCountsAsManyTimesAsItsSize) {
  // All logits 0, v = 1, 3, 5, 8, 0. Token 0 goes into token 1: v = 2, and with size 2 nothing is lost.
  // Step 1: o = (1 + 3 + 5 + 8)/4 = 4.25, o' = (2·2 + 5 + 8)/4 = 4.25.
  const MemoryTrace trace = merge_trace(1, {0, 0, 0, 0, 0}, {1, 3, 5, 8, 0});
  EvictionLog log{{merged(0, 0, {1, 0.5, 0.5, 2.0})}, {}};
  EXPECT_NEAR(output_error(drive(trace, log), 0, 1), 0.0, kSmall);
  // With size 1: o' = (2 + 5 + 8)/3 = 5, an error of 0.75; step 2: o = 17/5, o' = 15/4, 0.35.
  log.entries[0].merge->size = 1.0;
  EXPECT_NEAR(output_error(drive(trace, log), 0, 1), 0.75, kSmall);
  EXPECT_NEAR(output_error(drive(trace, log), 0, 2), 0.35, kSmall);
}

TEST(Merge, KeysAndValuesAreTheStatedMeanOfAllThatWentIn) {
  // Tokens 0 and 1 go into token 2, a quarter, a quarter and a half: k = ln 4 · (1/4 + 1/4) + 0 = ln 2, and
  // v = 4/4 + 8/4 + 2/2 = 4. Step 1: weights exp(ln 2) = 2 and 1 of token 3, o' = (2·4 + 1)/3 = 3;
  // o = (4·4 + 4·8 + 2 + 1)/(4 + 4 + 1 + 1) = 5.1.
  const float ln4 = std::log(4.0f);
  const MemoryTrace trace = merge_trace(1, {ln4, ln4, 0, 0, 0}, {4, 8, 2, 1, 0});
  const Merge merge{2, 0.5, 0.25, 1.0};
  RunResult run = drive(trace, {{merged(0, 0, merge), merged(0, 1, merge)}, {}});
  EXPECT_NEAR(output_error(run, 0, 1), 2.1, kSmall);
  EXPECT_NEAR(run.decode.at(Metric::output_error_relative, 0, 0, 0), 2.1 / 5.1, kSmall);
}

TEST(Merge, HasOutputErrorsAndNoMasses) {
  const MemoryTrace trace = merge_trace(1, {0, 0, 0, 0, 0}, {1, 3, 5, 8, 0});
  const RunResult run = drive(trace, {{merged(0, 0, {1, 0.5, 0.5, 1.0})}, {}});
  EXPECT_TRUE(run.merges);
  for (const Metric metric : {Metric::missed_mass, Metric::missed_pull, Metric::kl}) {
    EXPECT_FALSE(summarise(run.decode.all(metric)).has_value());
  }
  EXPECT_FALSE(summarise(run.top_now).has_value());
  EXPECT_EQ(run.attention_tokens, (std::vector<Index>{3, 4}));
}

TEST(Merge, WithinAPrefillItActsOnThatPrefillsRows) {
  // Layer 1 never sees token 0, but token 1 carries it: row 1 of its prefill is o' = 2 against o = (1 + 3)/2.
  // Row 2: o = 3, o' with size 2 = (2·2 + 5)/3 = 3, with size 1 (2 + 5)/2 = 3.5.
  const MemoryTrace trace = merge_trace(2, {0, 0, 0, 0, 0}, {1, 3, 5, 8, 0});
  EvictionLog log{{merged(0, 0, {1, 0.5, 0.5, 2.0}), merged(1, 0, {1, 0.5, 0.5, 2.0}, true)}, {}};
  RunResult run = drive(trace, log);
  EXPECT_EQ(run.log, log);
  EXPECT_TRUE(std::isnan(run.prefill.at(Metric::output_error, 1, 0, 0)));  // its query left
  EXPECT_NEAR(run.prefill.at(Metric::output_error, 1, 0, 1), 0.0, kSmall);
  EXPECT_NEAR(run.prefill.at(Metric::output_error, 1, 0, 2), 0.0, kSmall);
  EXPECT_NEAR(output_error(run, 1, 1), 0.0, kSmall);
  log.entries[1].merge->size = 1.0;
  run = drive(trace, log);
  EXPECT_NEAR(run.prefill.at(Metric::output_error, 1, 0, 2), 0.5, kSmall);
  EXPECT_NEAR(output_error(run, 1, 1), 0.75, kSmall);
}

TEST(Merge, ALogThatNoRunCanLeaveIsRefused) {
  const MemoryTrace trace = merge_trace(1, {0, 0, 0, 0, 0}, {1, 3, 5, 8, 0});
  const auto refusal = [&](const std::vector<LogEntry>& entries) -> std::string {
    try {
      drive(trace, {entries, {}});
      return "accepted";
    } catch (const TraceError& error) {
      return error.what();
    }
  };
  const Merge into_one{1, 0.5, 0.5, 1.0};
  const Merge into_two{2, 0.5, 0.5, 1.0};
  EXPECT_THAT(refusal({merged(0, 0, into_one), merged(0, 1, into_two)}),
              HasSubstr("run.h5: entry 0 (layer 0, token 0) is merged into token 1, which leaves itself"));
  LogEntry late = merged(0, 0, into_one);
  late.step = 1;
  EXPECT_THAT(refusal({late}), HasSubstr("is merged, expected in step 0 and into a prompt token"));
  EXPECT_THAT(refusal({merged(0, 0, {3, 0.5, 0.5, 1.0})}), HasSubstr("into a prompt token"));
  EXPECT_THAT(refusal({merged(0, 0, {1, 0.5, NAN, 1.0})}), HasSubstr("weights that are not finite"));
  EXPECT_THAT(refusal({merged(0, 0, {1, 0.5, 0.5, 0.0})}), HasSubstr("a size that is not above 0"));
  EXPECT_THAT(refusal({merged(0, 0, into_two), merged(0, 1, {2, 0.25, 0.5, 1.0})}),
              HasSubstr("another weight or size than an entry before"));
}

TEST(Merge, NeedsKeysAndValues) {
  MemoryTrace trace =
      testing::attention_trace({{{1.0f}, {0.5f, 0.5f}, {0.5f, 0.25f, 0.25f}}}, 2, {-1, -1, -1});
  EXPECT_THROW(drive(trace, {{merged(0, 0, {1, 0.5, 0.5, 1.0})}, {}}), NeedsError);
}

}  // namespace
}  // namespace hae
