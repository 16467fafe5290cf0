#include "testing/policy_contract.hpp"

#include <algorithm>
#include <cmath>
#include <exception>
#include <optional>
#include <thread>

#include "sim/logged_policy.hpp"

namespace hae::testing {
namespace {

using Traces = std::span<const MemoryTrace>;

std::string line_of(const LogEntry& entry) {
  std::string line = to_json_lines({{entry}, {}});
  line.erase(line.find_last_not_of('\n') + 1);
  return line;
}

/// How two logs differ first; nothing if they do not.
std::optional<std::string> difference(const EvictionLog& found, const EvictionLog& expected) {
  const auto entry = [](const EvictionLog& log, std::size_t i) {
    return i < log.entries.size() ? line_of(log.entries[i]) : std::string("missing");
  };
  for (std::size_t i = 0; i < std::max(found.entries.size(), expected.entries.size()); ++i) {
    if (i >= found.entries.size() || i >= expected.entries.size() ||
        found.entries[i] != expected.entries[i]) {
      return "eviction " + std::to_string(i) + " is\n  " + entry(found, i) + "\nand was\n  " +
             entry(expected, i);
    }
  }
  return found.pending == expected.pending
             ? std::nullopt
             : std::optional<std::string>("other tokens are pending at the end");
}

/// How two runs differ first; nothing if they do not.
std::optional<std::string> difference(const RunResult& found, const RunResult& expected) {
  if (const auto of_logs = difference(found.log, expected.log)) {
    return of_logs;
  }
  for (const Metric metric : kMetrics) {
    if (!same_numbers(found.decode.all(metric), expected.decode.all(metric)) ||
        !same_numbers(found.prefill.all(metric), expected.prefill.all(metric))) {
      return std::string("the logs agree, but not the rows' ") + name(metric);
    }
  }
  return same_results(found, expected) ? std::nullopt
                                       : std::optional<std::string>("the logs agree, but not the counts");
}

template <typename Result>
void expect_same(const Result& found, const Result& expected, const std::string& when) {
  if (const auto differs = difference(found, expected)) {
    throw ContractFailure(when + ", " + *differs);
  }
}

void expect(bool holds, const std::string& complaint) {
  if (!holds) {
    throw ContractFailure(complaint);
  }
}

void repeats_itself(const MakePolicy& make, Traces traces) {
  const auto policy = make();
  const RunResult first = run(traces[0], policy);
  expect_same(run(traces[0], policy), first, "replayed again");
}

void ignores_blocks(const MakePolicy& make, Traces traces) {
  const RunResult whole = run(traces[0], make());
  for (const Index rows : {1, 2, 7, 64}) {
    ReplayOptions options;
    options.block_rows = rows;
    expect_same(run(traces[0], make(), options), whole, "in blocks of " + std::to_string(rows) + " rows");
  }
}

void forgets(const MakePolicy& make, Traces traces) {
  const RunResult alone = run(traces[1], make());
  const auto policy = make();
  (void)run(traces[0], policy);
  expect_same(run(traces[1], policy), alone, "after another sequence");
}

void backwards(Index count, const std::function<void(Index)>& task) {
  for (Index i = count; i-- > 0;) {
    task(i);
  }
}

void on_threads(Index count, const std::function<void(Index)>& task) {
  std::vector<std::exception_ptr> thrown(at(count));
  {
    std::vector<std::jthread> threads;
    for (Index i = 0; i < count; ++i) {
      threads.emplace_back([&, i] {
        try {
          task(i);
        } catch (...) {
          thrown[at(i)] = std::current_exception();
        }
      });
    }
  }
  const auto first = std::ranges::find_if(thrown, [](const auto& error) { return error != nullptr; });
  if (first != thrown.end()) {
    std::rethrow_exception(*first);
  }
}

void keeps_layers_apart(const MakePolicy& make, Traces traces) {
  const RunResult in_order = run(traces[0], make());
  expect_same(run(traces[0], make(), {.for_each = backwards}), in_order, "with layers decoded last to first");
  expect_same(run(traces[0], make(), {.for_each = on_threads}), in_order, "with a thread a layer");
}

bool needs(const Policy& policy, const SequenceInfo& info, bool Needs::*what) {
  for (Index layer = 0; layer < info.layers; ++layer) {
    if (policy.needs(info, layer).*what) {
      return true;
    }
  }
  return false;
}

/// The closed loop decodes all layers of a step before the next step.
void decides_alike_in_a_model(const MakePolicy& make, Traces traces) {
  const MemoryTrace& trace = traces[0];
  const auto policy = make();
  if (trace.info.payload != Payload::qkv || policy->merges() ||
      needs(*policy, trace.info, &Needs::embedding_similarity) ||
      needs(*policy, trace.info, &Needs::unrotated_queries)) {
    return;  // A closed loop merges nothing, has no similarities, and turns queries back itself.
  }
  const RunResult open = run(trace, policy);
  if (std::ranges::any_of(open.log.entries, &LogEntry::within)) {
    return;  // Those tokens are in the recording's rows and in none of the model's.
  }
  expect_same(run_closed(trace, make(), trace.info.steps()).result, open, "in a closed loop");
}

/// Decode rows of a trace that attend to nothing.
Index masked_decode_rows(const MemoryTrace& trace) {
  const SequenceInfo& info = trace.info;
  Index masked = 0;
  for (const std::vector<float>& matrix : trace.attention) {
    for (Index row = 0; row < info.query_heads * info.tokens; ++row) {
      const float* w = matrix.data() + row * info.tokens;
      const bool is_zero = std::all_of(w, w + info.tokens, [](float x) { return x == 0.0f; });
      masked += row % info.tokens >= info.prompt && is_zero ? 1 : 0;
    }
  }
  return masked;
}

void is_measured(const MakePolicy& make, Traces traces) {
  const SequenceInfo& info = traces[0].info;
  const RunResult result = run(traces[0], make());
  const auto numbers = [&](Metric metric) {
    return std::ranges::count_if(result.decode.all(metric),
                                 [](double x) { return std::isfinite(x) && x >= 0.0; });
  };
  const Index measured = info.layers * info.query_heads * info.steps() - masked_decode_rows(traces[0]);
  if (result.merges) {  // It has output errors alone.
    expect(numbers(Metric::missed_mass) == 0, "a run that merges has missed masses");
    expect(numbers(Metric::output_error) + result.removed_all_rows == measured, "output errors are missing");
    return;
  }
  expect(numbers(Metric::missed_mass) == measured, "missed masses are missing");
  expect(std::ranges::none_of(result.decode.all(Metric::missed_mass), [](double m) { return m > 1.0; }),
         "a missed mass exceeds 1");
  expect(numbers(Metric::missed_pull) == measured, "missed pulls are missing");
  const Index with_mass = numbers(Metric::kl);
  expect(measured - with_mass <= result.removed_all_rows, "KLs are missing");
  expect(numbers(Metric::output_error) == with_mass, "output errors are missing");
  expect(numbers(Metric::output_error_relative) == with_mass, "relative output errors are missing");
}

void is_driven_by_its_log(const MakePolicy& make, Traces traces) {
  const RunResult result = run(traces[0], make());
  const RunResult again = run(traces[0], logged_policy({"log", {}, "its log", result.lanes, result.log}));
  if (again.merges != result.merges) {
    expect_same(again.log, result.log, "driven by its log");
    return;  // A log in which nothing was merged does not say that its policy merges.
  }
  expect_same(again, result, "driven by its log");
}

/// The engine holds every run to its limits; this counts once more, from the log.
void keeps_its_limits(const MakePolicy& make, Traces traces) {
  const SequenceInfo& info = traces[0].info;
  const RunResult result = run(traces[0], make());
  const Index lanes = lane_count(info, result.lanes);
  for (const LogEntry& entry : result.log.entries) {
    const Limits& limits = result.limits[at(entry.layer * lanes + std::max<Index>(entry.lane, 0))];
    expect(entry.token >= limits.sinks, "a sink left: " + line_of(entry));
  }
  for (Index layer = 0; layer < info.layers; ++layer) {
    for (Index lane = 0; lane < lanes; ++lane) {
      const Limits& limits = result.limits[at(layer * lanes + lane)];
      const auto after = residents(traces[0], result, layer, lane);
      for (Index step = 0; limits.capacity && step <= info.steps(); ++step) {
        const Index capacity = *limits.capacity + (limits.grows ? step : 0);
        const auto size = static_cast<Index>(after[at(step)].size());
        expect(size <= capacity, "layer " + std::to_string(layer) + ", lane " + std::to_string(lane) +
                                     " holds " + std::to_string(size) + " tokens after step " +
                                     std::to_string(step) + ", its capacity is " + std::to_string(capacity));
      }
    }
  }
}

struct Stated {
  bool keys = false;
  bool values = false;
  bool unrotated_queries = false;
  bool embedding_similarity = false;
  std::vector<Index> prompt_rows;  ///< of a trace that stores what is stated and no more
};

Stated stated_needs(const Policy& policy, const SequenceInfo& info) {
  Stated all{needs(policy, info, &Needs::keys), needs(policy, info, &Needs::values),
             needs(policy, info, &Needs::unrotated_queries),
             needs(policy, info, &Needs::embedding_similarity)};
  for (Index row = 0; row < info.prompt; ++row) {
    for (Index layer = 0; layer < info.layers; ++layer) {
      const Needs needs = policy.needs(info, layer);
      if (needs.prompt_rows == PromptRows::all || row >= info.prompt - needs.newest_prompt_rows ||
          (needs.prompt_rows == PromptRows::text && !info.is_visual(row))) {
        all.prompt_rows.push_back(row);
        break;
      }
    }
  }
  return all;
}

MemoryTrace without_values(MemoryTrace trace) {
  trace.values.clear();
  trace.info.has_values = false;
  return trace;
}

MemoryTrace without_unrotated_queries(MemoryTrace trace) {
  trace.unrotated_queries.clear();
  trace.info.rotary.reset();
  return trace;
}

MemoryTrace without_similarity(MemoryTrace trace) {
  trace.similarity.clear();
  trace.info.has_embedding_similarity = false;
  return trace;
}

/// The trace with what is stated and nothing else that a trace may lack.
MemoryTrace reduced_to(const Stated& stated, MemoryTrace trace) {
  if (trace.info.payload == Payload::attention) {  // A qkv payload has all rows.
    trace.info.prompt_rows = stated.prompt_rows;
  }
  trace = stated.values ? trace : without_values(std::move(trace));
  trace = stated.unrotated_queries ? trace : without_unrotated_queries(std::move(trace));
  return stated.embedding_similarity ? trace : without_similarity(std::move(trace));
}

void expect_refusal(const MakePolicy& make, const MemoryTrace& trace, const std::string& what) {
  try {
    (void)run(trace, make());
  } catch (const NeedsError&) {
    return;
  }
  throw ContractFailure("a trace without " + what + ", which it needs, is not refused");
}

void states_its_needs(const MakePolicy& make, Traces traces) {
  const MemoryTrace& trace = traces[0];
  const Stated stated = stated_needs(*make(), trace.info);
  const RunResult with_everything = run(trace, make());
  expect_same(run(reduced_to(stated, trace), make()).log, with_everything.log,
              "with no more than it says it needs");
  if (stated.values) {
    expect_refusal(make, without_values(trace), "values");
  }
  if (stated.unrotated_queries) {
    expect_refusal(make, without_unrotated_queries(trace), "queries before rotary embedding");
  }
  if (stated.embedding_similarity) {
    expect_refusal(make, without_similarity(trace), "similarities of embeddings");
  }
  if (stated.keys) {
    MemoryTrace probabilities = trace;  // It is refused before a number of it is read.
    probabilities.info.payload = Payload::attention;
    expect_refusal(make, probabilities, "keys");
  }
  if (!stated.prompt_rows.empty() && trace.info.payload == Payload::attention) {
    MemoryTrace lacking = trace;
    std::erase(lacking.info.prompt_rows, stated.prompt_rows.back());
    expect_refusal(make, lacking, "prompt row " + std::to_string(stated.prompt_rows.back()));
  }
}

/// Policies that evict whole blocks round their budget down, so it is a block's worth more than all tokens.
constexpr Index kLargestBlock = 8;

/// Whether no row after the step of its eviction sees the token.
bool is_out_of_sight(const SequenceInfo& info, const LogEntry& entry) {
  const Index window = info.masks[at(entry.layer)].window;
  return window > 0 && entry.token <= info.prompt + entry.step - window;
}

void loses_nothing_under_a_full_budget(const MakePolicy& make, Traces traces) {
  const SequenceInfo& info = traces[0].info;
  const auto policy = make()->with_budget(info.tokens + kLargestBlock);
  for (const LogEntry& entry : run(traces[0], policy).log.entries) {
    const bool is_pruned = entry.step == 0 && policy->prunes() && info.is_visual(entry.token);
    expect(is_pruned || is_out_of_sight(info, entry), "under a budget of all tokens " + line_of(entry));
  }
}

void reports_budgets_above_windows(const MakePolicy& make, Traces traces) {
  const SequenceInfo& info = traces[0].info;
  const Index budget = std::ranges::max(info.masks, {}, &MaskRule::window).window * 2 + 7;
  if (budget > info.prompt) {
    return;  // Policies of the prompt may take it for the size of the prompt.
  }
  const RunResult result = run(traces[0], make()->with_budget(budget));
  const auto is_reported = [&](const std::string& layer) {
    return std::ranges::any_of(result.warnings, [&](const std::string& warning) {
      return warning.starts_with(layer + ":") && warning.find("window") != std::string::npos;
    });
  };
  for (Index layer = 0; layer < info.layers; ++layer) {
    const std::string name = "layer " + std::to_string(layer);
    expect(info.masks[at(layer)].window == 0 || is_reported(name), "a budget of " + std::to_string(budget) +
                                                                       " exceeds the window of " + name +
                                                                       ", and no warning says so");
  }
}

}  // namespace

std::vector<PolicyProperty> policy_contract() {
  return {
      {"ReplayingTwiceGivesTheSameRun", "a sequence that is replayed again gives the same run", 1,
       repeats_itself},
      {"TheSizeOfABlockChangesNothing", "the size of a block of prompt rows changes nothing", 1,
       ignores_blocks},
      {"OneSequenceAfterAnotherIsForgotten", "begin forgets all sequences before", 2, forgets},
      {"TheOrderOfLayersChangesNothing", "layers share nothing while decoding", 1, keeps_layers_apart},
      {"AClosedLoopDecidesTheSame", "a model that computes what was recorded gets the same decisions", 1,
       decides_alike_in_a_model},
      {"EveryRowIsMeasuredAndFinite", "every decode row is measured by finite numbers", 1, is_measured},
      {"ItsLogDrivesTheSameRun", "the stored log, as a policy, gives the same run", 1, is_driven_by_its_log},
      {"ItKeepsItsLimits", "it proposes what it may, and stays within the limits it promises", 1,
       keeps_its_limits},
      {"ItStatesItsNeeds", "it uses what it says it needs, and a trace that lacks that is refused", 1,
       states_its_needs},
  };
}

std::vector<PolicyProperty> budget_contract() {
  return {
      {"ABudgetOfAllTokensLosesNothing",
       "a budget of all tokens and " + std::to_string(kLargestBlock) +
           " more evicts only what is pruned or out of sight",
       1, loses_nothing_under_a_full_budget},
      {"ABudgetAboveAWindowIsReported", "a budget above a layer's window is warned of", 1,
       reports_budgets_above_windows},
  };
}

}  // namespace hae::testing
