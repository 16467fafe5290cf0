#include <gtest/gtest.h>
// RapidCheck needs GoogleTest first.
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include "reference/policies.hpp"
#include "sim/logged_policy.hpp"
#include "testing/generators.hpp"
#include "testing/memory_trace.hpp"
#include "testing/policy_contract.hpp"
#include "tests/support/interesting.hpp"
#include "tests/support/policy_specs.hpp"

// What holds for every policy of the table on every trace, and the theorems that tie policies together.

namespace hae {
namespace {

using testing::attention_traces;
using testing::MemoryTrace;
using testing::policy_specs;
using testing::possible_run;
using testing::residents;
using testing::run;
using testing::run_all;
using testing::same_numbers;
using testing::same_results;

Index lane_total(const RunResult& run, const MemoryTrace& trace) {
  return lane_count(trace.info, run.lanes);
}

TEST(Replay, NeverHoldsMoreThanTheStatedCapacity) {
  testing::check_interesting("capacity", 0.4, [] {
    const MemoryTrace trace = *attention_traces();
    const std::string spec = *policy_specs(trace.info);
    const std::optional<RunResult> result = possible_run(trace, spec);
    RC_PRE(result.has_value());
    for (Index layer = 0; layer < trace.info.layers; ++layer) {
      for (Index lane = 0; lane < lane_total(*result, trace); ++lane) {
        const Limits& limits = result->limits[at(layer * lane_total(*result, trace) + lane)];
        const auto after = residents(trace, *result, layer, lane);
        for (std::size_t step = 1; step < after.size(); ++step) {
          const auto size = static_cast<Index>(after[step].size());
          const Index grown = limits.grows ? static_cast<Index>(step) : 0;
          RC_ASSERT(!limits.capacity || size <= *limits.capacity + grown);
          const Index at_attention = static_cast<Index>(after[step - 1].size()) + 1;
          RC_ASSERT(result->attention_tokens[static_cast<std::size_t>(
                        (layer * lane_total(*result, trace) + lane) * trace.info.steps() +
                        static_cast<Index>(step) - 1)] == at_attention);
          // Once the budget has been reached it is kept filled.
          const bool was_full = limits.budget && static_cast<Index>(after[step - 1].size()) >= *limits.budget;
          RC_ASSERT(!was_full || size >= *limits.budget);
        }
      }
    }
    return !result->log.entries.empty();
  });
}

RC_GTEST_PROP(Replay, NeverEvictsAProtectedToken, ()) {
  const MemoryTrace trace = *attention_traces();
  const std::string spec = *policy_specs(trace.info);
  const std::optional<RunResult> result = possible_run(trace, spec);
  RC_PRE(result.has_value());
  for (const LogEntry& entry : result->log.entries) {
    const Index lane = std::max<Index>(0, entry.lane);
    const Limits& limits = result->limits[at(entry.layer * lane_total(*result, trace) + lane)];
    RC_ASSERT(entry.token >= limits.sinks);
    if (entry.step == 0) {
      continue;  // Pruning may take recent prompt tokens; fit is covered by the decode rule's property below.
    }
    const auto before = residents(trace, *result, entry.layer, lane);
    const std::vector<Index>& cache = before[static_cast<std::size_t>(entry.step - 1)];
    const Index newer = std::ranges::count_if(cache, [&](Index token) { return token > entry.token; }) +
                        1;  // the step's own token
    const Index own = entry.token == trace.info.prompt + entry.step - 1 ? 1 : 0;
    RC_ASSERT(newer - own >= limits.recent);
  }
}

RC_GTEST_PROP(Replay, LogsAreSortedAndUnique, ()) {
  const MemoryTrace trace = *attention_traces();
  const std::optional<RunResult> result = possible_run(trace, *policy_specs(trace.info));
  RC_PRE(result.has_value());
  const auto key = [](const LogEntry& e) { return std::tuple(e.step, e.layer, e.lane, e.token); };
  const std::vector<LogEntry>& entries = result->log.entries;
  RC_ASSERT(std::ranges::is_sorted(entries, {}, key));
  std::set<std::tuple<Index, Index, Index>> gone;
  for (const LogEntry& entry : entries) {
    RC_ASSERT(gone.emplace(entry.layer, entry.lane, entry.token).second);
    RC_ASSERT(entry.token < trace.info.prompt + entry.step);
  }
}

TEST(Replay, KeepsTheContractUnderEveryOption) {
  testing::check_interesting("the contract", 0.3, [] {
    testing::TraceBounds bounds;
    bounds.most_layers = 6;
    const auto drawn = rc::gen::oneOf(attention_traces(bounds), testing::qkv_traces(bounds));
    const std::vector<MemoryTrace> traces{*drawn, *drawn};
    const std::string spec = *policy_specs(traces[0].info);
    const std::optional<RunResult> result = possible_run(traces[0], spec);
    RC_PRE(result.has_value() && possible_run(traces[1], spec).has_value());
    for (const testing::PolicyProperty& property : testing::policy_contract()) {
      property.check_on([&] { return reference::make_policy(spec); }, traces);
    }
    return !result->log.entries.empty();
  });
}

TEST(Replay, WithoutPromptRowsDecodingIsTheSame) {
  testing::check_interesting("decode only", 0.4, [] {
    const MemoryTrace trace = *attention_traces();
    const std::optional<RunResult> result = possible_run(trace, *policy_specs(trace.info));
    RC_PRE(result.has_value());
    const auto again = logged_policy({"log", {}, "run.h5", result->lanes, result->log});
    testing::MemorySequence sequence(trace);
    ReplayOptions options;
    options.prompt_rows = false;
    const RunResult decoded = replay(sequence, {again}, options, "memory").front();
    RC_ASSERT(decoded.log == result->log);
    for (const Metric metric : kMetrics) {
      RC_ASSERT(same_numbers(decoded.decode.all(metric), result->decode.all(metric)));
    }
    return !result->log.entries.empty();
  });
}

RC_GTEST_PROP(Replay, ARunIsTheSameAloneAndInCompany, ()) {
  const MemoryTrace trace = *rc::gen::oneOf(attention_traces(), testing::qkv_traces());
  std::vector<std::string> specs;
  for (int i = 0; i < 4; ++i) {
    const std::string spec = *policy_specs(trace.info);
    if (possible_run(trace, spec)) {
      specs.push_back(spec);
    }
  }
  RC_PRE(!specs.empty());
  const std::vector<RunResult> together = run_all(trace, specs);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    RC_ASSERT(same_results(run(trace, specs[i]), together[i]));
  }
}

RC_GTEST_PROP(Replay, PermutingTheHeadsOfALaneChangesNothing, ()) {
  testing::TraceBounds bounds;
  bounds.dyadic = true;
  bounds.allow_masked = false;
  const MemoryTrace trace = *attention_traces(bounds);
  // Full scores: a = w, so sums over heads are exact and their order cannot matter; a' would be rounded per
  // head.
  const std::string spec = *rc::gen::element<std::string>(
      "greedy:budget=3,scores=full,recent=0", "hae:dap=none,bin=2,budget=3,scores=full",
      "hae:r=0.5,alpha=2,ddes=none", "hae:dap=mass,eps=0.5,ddes=none");
  const SequenceInfo& info = trace.info;
  MemoryTrace permuted = trace;
  const auto elements = static_cast<std::size_t>(info.tokens * info.tokens);
  const std::vector<Index> order = *rc::gen::exec([&] {
    std::vector<Index> heads(static_cast<std::size_t>(info.query_heads));
    std::iota(heads.begin(), heads.end(), 0);
    for (std::size_t i = heads.size(); i > 1; --i) {
      std::swap(heads[i - 1], heads[*rc::gen::inRange<std::size_t>(0, i)]);
    }
    return heads;
  });
  for (std::size_t layer = 0; layer < trace.attention.size(); ++layer) {
    for (std::size_t h = 0; h < order.size(); ++h) {
      std::copy_n(trace.attention[layer].begin() +
                      static_cast<std::ptrdiff_t>(static_cast<std::size_t>(order[h]) * elements),
                  elements, permuted.attention[layer].begin() + static_cast<std::ptrdiff_t>(h * elements));
    }
  }
  RC_ASSERT(run(permuted, spec).log == run(trace, spec).log);
}

RC_GTEST_PROP(Replay, ABudgetOfAllTokensEvictsNothing, ()) {
  const MemoryTrace trace = *attention_traces();
  const std::string budget = std::to_string(trace.info.tokens);
  for (const std::string& spec :
       {"hae:dap=none,recent=0,budget=" + budget, "hae:dap=none,ddes=batch,recent=0,budget=" + budget,
        "greedy:recent=0,budget=" + budget, "h2o/layerwise:budget=" + budget,
        "window:sinks=0,budget=" + budget, "random:budget=" + budget, "tova:budget=" + budget,
        "h2o/flexgen:budget=" + budget, "h2o/history:sinks=0,recent=1,budget=" + budget,
        "scissorhands:sinks=0,recent=1,budget=" + budget, "nacl:sinks=0,recent=0,budget=" + budget,
        "h2o/ov-block:block=1,sinks=0,recent=1,budget=" + budget, std::string("full")}) {
    const RunResult result = run(trace, spec);
    RC_ASSERT(result.log.entries.empty());
    RC_ASSERT(result.log.pending.empty());
  }
}

TEST(Replay, ABinOfOneIsGreedyEviction) {
  testing::check_interesting("a bin of one", 0.4, [] {
    const MemoryTrace trace = *attention_traces();
    const std::string shared =
        ",budget=" + std::to_string(*rc::gen::inRange<Index>(1, 12)) +
        *rc::gen::element<std::string>("", ",lane=kv_head", ",lane=kv_head,group=max") +
        *rc::gen::element<std::string>("", ",score=mean") +
        *rc::gen::element<std::string>("", ",scores=full") +
        *rc::gen::element<std::string>(",dap=none", ",dap=threshold,r=0.2,alpha=0.5");
    const std::optional<RunResult> bin = possible_run(trace, "hae:bin=1" + shared);
    RC_PRE(bin.has_value());
    RunResult greedy = run(trace, "greedy:recent=1" + shared);
    EvictionLog expected = greedy.log;
    EvictionLog found = bin->log;
    for (LogEntry& entry : found.entries) {
      RC_ASSERT(entry.step == 0 || entry.pending_since == entry.step);
      entry.pending_since.reset();
    }
    RC_ASSERT(found == expected);
    return !found.entries.empty();
  });
}

// §8.3 G1 of the theory, pointwise: under full scores the bin marks what greedy evicts at that step, so its
// evicted set is a subset of greedy's and it misses no more mass in any row.
TEST(Replay, UnderFullScoresTheBinNeverMissesMoreThanGreedyOfTheSameBudget) {
  testing::check_interesting("the bin against greedy", 0.4, [] {
    const MemoryTrace trace = *attention_traces();
    const std::string shared =
        ",scores=full,dap=none,budget=" + std::to_string(*rc::gen::inRange<Index>(1, 12)) +
        *rc::gen::element<std::string>("", ",lane=kv_head") +
        *rc::gen::element<std::string>("", ",score=mean");
    const std::string bin = std::to_string(*rc::gen::inRange<Index>(2, 6));
    const RunResult ddes = run(trace, "hae:bin=" + bin + shared);
    const RunResult greedy = run(trace, "greedy:recent=1" + shared);
    std::set<std::tuple<Index, Index, Index, Index>> marked;
    for (const LogEntry& e : ddes.log.entries) {
      marked.emplace(e.pending_since.value_or(0), e.layer, e.lane, e.token);
    }
    for (const PendingEntry& e : ddes.log.pending) {
      marked.emplace(e.since, e.layer, e.lane, e.token);
    }
    std::set<std::tuple<Index, Index, Index, Index>> evicted;
    for (const LogEntry& e : greedy.log.entries) {
      evicted.emplace(e.step, e.layer, e.lane, e.token);
    }
    RC_ASSERT(marked == evicted);
    const auto mine = ddes.decode.all(Metric::missed_mass);
    const auto theirs = greedy.decode.all(Metric::missed_mass);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      RC_ASSERT(std::isnan(mine[i]) || mine[i] <= theirs[i]);
    }
    return !ddes.log.entries.empty();
  });
}

RC_GTEST_PROP(Replay, H2OIsGreedyWithItsOwnDefaults, ()) {
  const MemoryTrace trace = *attention_traces();
  const Index budget = *rc::gen::inRange<Index>(2, 16);
  const RunResult h2o = run(trace, "h2o/layerwise:budget=" + std::to_string(budget));
  const RunResult greedy = run(trace, "greedy:lane=kv_head,budget=" + std::to_string(budget) +
                                          ",recent=" + std::to_string(std::max<Index>(1, budget / 2)));
  RC_ASSERT(h2o.log == greedy.log);
}

RC_GTEST_PROP(Replay, SizesAreWhatThePolicyForetold, ()) {
  const MemoryTrace trace = *attention_traces();
  const std::string spec = *rc::gen::element<std::string>(
      "greedy", "hae:dap=none", "hae:dap=none,ddes=batch,bin=3", "hae:dap=none,bin=0.5,recent=0",
      "h2o/layerwise", "window:sinks=1", "random:seed=3,lane=kv_head", "streaming:sinks=2", "tova",
      "h2o/flexgen", "h2o/history:sinks=1,recent=2", "h2o/ov-block:block=3,sinks=3,recent=3",
      "h2o/ov-block:block=1,sinks=0,recent=2", "scissorhands:sinks=1,recent=1,select=sample",
      "nacl:sinks=1,recent=1", "nacl:sinks=0,recent=1,random=2");
  const auto open = reference::make_policy(spec);
  const Index budget = *rc::gen::inRange<Index>(1, trace.info.tokens + 1);
  std::optional<LaneSizes> sizes = LaneSizes{};  // of one lane of each layer
  for (Index layer = 0; layer < trace.info.layers && sizes; ++layer) {
    const std::optional<LaneSizes> of_layer = open->sizes(trace.info, layer, budget, trace.info.prompt);
    sizes =
        of_layer
            ? std::optional(LaneSizes{sizes->total + of_layer->total, std::max(sizes->peak, of_layer->peak)})
            : std::nullopt;
  }
  RC_PRE(sizes.has_value());
  testing::MemorySequence sequence(trace);
  const RunResult result = replay(sequence, {open->with_budget(budget)}, {}, "memory").front();
  RC_ASSERT(total_attention_tokens(result) == sizes->total * lane_total(result, trace));
  if (trace.info.steps() > 0) {
    RC_ASSERT(std::ranges::max(result.attention_tokens) == sizes->peak);
  }
}

}  // namespace
}  // namespace hae
