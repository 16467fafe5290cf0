#include "sim/logged_policy.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "testing/memory_trace.hpp"

namespace hae {
namespace {

using ::testing::HasSubstr;

/// Two layers, P = 2, T = 4.
testing::MemoryTrace small_trace() {
  const std::vector<std::vector<float>> rows = {
      {1.0f}, {0.5f, 0.5f}, {0.5f, 0.25f, 0.25f}, {0.25f, 0.25f, 0.25f, 0.25f}};
  return testing::attention_trace({rows, rows}, 2, {-1, 0, -1, -1});
}

RunResult drive(EvictionLog log, LaneKind lanes = LaneKind::layer) {
  const testing::MemoryTrace trace = small_trace();
  testing::MemorySequence sequence(trace);
  return replay(sequence, {logged_policy({"log", {}, "run.h5", lanes, std::move(log)})}, {}, "memory")
      .front();
}

std::string refusal(EvictionLog log, LaneKind lanes = LaneKind::layer) {
  try {
    drive(std::move(log), lanes);
  } catch (const TraceError& error) {
    return error.what();
  }
  return "accepted";
}

LogEntry entry(Index step, Index layer, Index token) {
  return {step, layer, kLayerLane, token, false, {}, {}, {}};
}

TEST(LoggedPolicy, DrivesEverythingALogCanSay) {
  EvictionLog log;
  log.entries = {entry(0, 0, 1), entry(0, 1, 1), entry(2, 0, 0)};
  log.entries[0].score = 0.125;
  log.entries[1].within = true;
  log.entries[2].pending_since = 1;
  log.pending = {{1, kLayerLane, 3, 2}};
  const RunResult result = drive(log);
  EXPECT_EQ(result.log, log);
  // Residents at attention time: layer 0 holds {0, 2}, then {0, 2, 3}; layer 1 the same.
  EXPECT_EQ(result.attention_tokens, (std::vector<Index>{2, 3, 2, 3}));
  EXPECT_EQ(result.final_tokens, (std::vector<Index>{2, 3}));
}

TEST(LoggedPolicy, RefusesALogThatNoRunOfTheSequenceCanLeave) {
  EXPECT_THAT(refusal({{entry(3, 0, 0)}, {}}),
              HasSubstr("run.h5: entry 0 (step 3, layer 0, lane -1, token 0) "
                        "names a step that does not exist, expected 0 .. 2"));
  EXPECT_THAT(refusal({{entry(1, 2, 0)}, {}}),
              HasSubstr("names a layer that does not exist, expected 0 .. 1"));
  EXPECT_THAT(refusal({{entry(1, 0, 3)}, {}}), HasSubstr("has not joined yet, expected 0 .. 2"));
  EXPECT_THAT(refusal({{entry(0, 0, 2)}, {}}), HasSubstr("has not joined yet, expected 0 .. 1"));
  EXPECT_THAT(refusal({{entry(1, 0, 0), entry(2, 0, 0)}, {}}), HasSubstr("leaves twice"));
  EXPECT_THAT(refusal({{entry(1, 0, 0)}, {}}, LaneKind::kv_head),
              HasSubstr("names a lane that does not exist, expected 0 .. 0"));

  LogEntry within = entry(0, 0, 1);
  within.within = true;
  EXPECT_THAT(refusal({{within}, {}}),
              HasSubstr("acts within a prefill, expected step 0 of a layer above 0"));
  LogEntry marked = entry(1, 0, 0);
  marked.pending_since = 2;
  EXPECT_THAT(refusal({{marked}, {}}), HasSubstr("was marked in step 2, expected 1 .. 1"));
  EXPECT_THAT(refusal({{}, {{0, kLayerLane, 3, 1}}}),
              HasSubstr("pending token 3 of layer 0, lane -1 was marked "
                        "in step 1, expected 2 .. 2"));
  EXPECT_THAT(refusal({{entry(1, 0, 0)}, {{0, kLayerLane, 0, 1}}}), HasSubstr("leaves twice"));
}

/// What the engine says of a log under limits that hold in both layers.
std::string broken_promise(EvictionLog log, const Limits& limits) {
  const testing::MemoryTrace trace = small_trace();
  testing::MemorySequence sequence(trace);
  try {
    (void)replay(sequence,
                 {logged_policy(
                     {.spec = "log", .where = "run.h5", .log = std::move(log), .limits = {limits, limits}})},
                 {}, "memory");
  } catch (const ContractViolation& error) {
    return error.what();
  }
  return "accepted";
}

TEST(LoggedPolicy, IsHeldToWhatThePolicyPromised) {
  // Layer 0 evicts token 0 in step 1, where tokens 0, 1 and 2 are resident.
  const EvictionLog log{{entry(1, 0, 0)}, {}};
  EXPECT_EQ(broken_promise(log, {}), "accepted");
  EXPECT_EQ(broken_promise(log, {.recent = 2}), "accepted");
  EXPECT_THAT(broken_promise(log, {.sinks = 1}), HasSubstr("token 0 is a protected sink"));
  EXPECT_THAT(broken_promise(log, {.recent = 3}), HasSubstr("token 0 is protected as recent"));
  // Layer 0 holds tokens 1 and 2 after step 1, and token 3 too after step 2.
  EXPECT_THAT(broken_promise(log, {.capacity = 2}), HasSubstr("after step 2 layer 0, lane 0 holds 3 tokens"));
  EXPECT_THAT(broken_promise({{}, {{0, kLayerLane, 0, 1}, {0, kLayerLane, 1, 2}}}, {.bin = 1}),
              HasSubstr("after step 2 layer 0, lane 0 holds 4 tokens, 2 of them pending"));
  // What is pruned in the prefill may be recent.
  EXPECT_EQ(broken_promise({{entry(0, 0, 1)}, {}}, {.recent = 2}), "accepted");
}

TEST(LoggedPolicy, SaysWhatTheRunHadToSay) {
  const testing::MemoryTrace trace = small_trace();
  testing::MemorySequence sequence(trace);
  const RunResult result =
      replay(sequence, {logged_policy({.spec = "log", .where = "run.h5", .warnings = {"nothing to prune"}})},
             {}, "memory")
          .front();
  EXPECT_THAT(result.warnings, ::testing::ElementsAre("nothing to prune"));
}

}  // namespace
}  // namespace hae
