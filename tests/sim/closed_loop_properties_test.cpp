#include <gtest/gtest.h>
// RapidCheck needs GoogleTest first.
#include <rapidcheck/gtest.h>

#include <algorithm>

#include "testing/generators.hpp"
#include "testing/memory_trace.hpp"
#include "tests/support/interesting.hpp"
#include "tests/support/policy_specs.hpp"

// A model that computes what a trace holds is the open loop: the closed loop must then give the open loop's
// results, bit for bit.

namespace hae {
namespace {

using testing::MemoryTrace;
using testing::policy_specs;
using testing::possible_run;
using testing::qkv_traces;
using testing::run;
using testing::run_closed;
using testing::same_results;

bool acts_within(const RunResult& result) {
  return std::ranges::any_of(result.log.entries, &LogEntry::within);
}

TEST(ClosedLoop, GivesTheOpenLoopsResultsWhenTheModelComputesWhatTheTraceHolds) {
  testing::check_interesting("closed equals open", 0.4, [] {
    const MemoryTrace trace = *qkv_traces();
    const std::string spec = *policy_specs(trace.info);
    const std::optional<RunResult> open = possible_run(trace, spec);
    RC_PRE(open.has_value());
    if (acts_within(*open)) {
      return false;  // those tokens are in the recording's rows and in none of the model's
    }
    const ClosedLoop::Finished closed = run_closed(trace, spec, trace.info.steps());
    RC_ASSERT(same_results(closed.result, *open));
    RC_ASSERT(closed.result.warnings == open->warnings);
    return !open->log.entries.empty();
  });
}

TEST(ClosedLoop, PrunesWithinThePrefillWhatTheOpenLoopPrunes) {
  testing::check_interesting("pruned within", 0.2, [] {
    const MemoryTrace trace = *qkv_traces({.least_tokens = 12, .prunable = true});
    // Decisions of layer 0 see nothing of what other layers lack. A large r takes most of a small picture.
    const std::string spec = *rc::gen::elementOf(std::vector<std::string>{
        "hae:r=0.9,alpha=1,ddes=none,lane=kv_head", "hae:r=0.5,alpha=1,ddes=none,heads=max"});
    const RunResult open = run(trace, spec);
    const ClosedLoop::Finished closed = run_closed(trace, spec, trace.info.steps());
    RC_ASSERT(closed.result.log == open.log);
    RC_ASSERT(closed.result.attention_tokens == open.attention_tokens);
    RC_ASSERT(closed.result.prefill_tokens == open.prefill_tokens);
    for (Index layer = 0; layer < trace.info.layers; ++layer) {
      for (const double missed : closed.result.decode.layer(Metric::missed_mass, layer)) {
        // Only layer 0 had a key to lose.
        RC_ASSERT(layer == 0 || missed == 0.0);
      }
    }
    return acts_within(open);
  });
}

RC_GTEST_PROP(ClosedLoop, ThatEndsEarlyIsTheOpenLoopOfTheShorterSequence, ()) {
  const MemoryTrace trace = *qkv_traces({.allow_decode_less = false});
  const std::string spec = *policy_specs(trace.info);
  const Index steps = *rc::gen::inRange<Index>(0, trace.info.steps() + 1);
  MemoryTrace shorter = trace;
  shorter.info.tokens = trace.info.prompt + steps;
  shorter.info.image.resize(at(shorter.info.tokens));
  const auto shorten = [&](std::vector<std::vector<float>>& layers, Index heads) {
    const Index head_dim = *trace.info.head_dim;
    for (std::vector<float>& layer : layers) {
      std::vector<float> kept;
      for (Index h = 0; h < heads; ++h) {
        const auto row = layer.begin() + h * trace.info.tokens * head_dim;
        kept.insert(kept.end(), row, row + shorter.info.tokens * head_dim);
      }
      layer = std::move(kept);
    }
  };
  shorten(shorter.queries, trace.info.query_heads);
  shorten(shorter.keys, trace.info.kv_heads);
  shorten(shorter.values, trace.info.kv_heads);
  const std::optional<RunResult> open = possible_run(shorter, spec);
  RC_PRE(open.has_value());
  RC_PRE(!acts_within(*open));
  const ClosedLoop::Finished closed = run_closed(trace, spec, steps);
  RC_ASSERT(closed.info.tokens == shorter.info.tokens);
  RC_ASSERT(same_results(closed.result, *open));
}

}  // namespace
}  // namespace hae
