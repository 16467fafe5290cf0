#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iostream>
#include <map>
#include <numeric>
#include <regex>
#include <set>

#include "reference/policies.hpp"
#include "sim/logged_policy.hpp"
#include "tests/support/memory_trace.hpp"

// Every policy of the table on every trace below: a policy that is added to the table is tested before anyone
// writes a test for it.

namespace hae {
namespace {

using testing::attention_trace;
using testing::MemoryTrace;
using Rows = std::vector<std::vector<float>>;

/// Causal rows in which key j weighs weight(i, j), normalised.
template <typename Weight>
Rows rows_of(Index tokens, const Weight& weight) {
  Rows rows;
  for (Index i = 0; i < tokens; ++i) {
    std::vector<float> row;
    double sum = 0.0;
    for (Index j = 0; j <= i; ++j) {
      sum += weight(i, j);
    }
    for (Index j = 0; j <= i; ++j) {
      row.push_back(static_cast<float>(weight(i, j) / sum));
    }
    rows.push_back(row);
  }
  return rows;
}

std::vector<Index> pictures(Index tokens, std::initializer_list<Range> ranges) {
  std::vector<Index> image(static_cast<std::size_t>(tokens), -1);
  Index id = 0;
  for (const Range& range : ranges) {
    std::fill(image.begin() + range.begin, image.begin() + range.end, id++);
  }
  return image;
}

/// A number that depends on two others and looks irregular, in [-1, 1].
float irregular(Index a, Index b) {
  return std::sin(static_cast<float>(a * 37 + b * 11));
}

void add_values(MemoryTrace& trace) {
  trace.info.has_values = true;
  const Index size = trace.info.kv_heads * trace.info.tokens * *trace.info.head_dim;
  for (Index layer = 0; layer < trace.info.layers; ++layer) {
    std::vector<float>& values = trace.values.emplace_back();
    for (Index i = 0; i < size; ++i) {
      values.push_back(irregular(layer, i));
    }
  }
}

struct Recomputed {
  Index tokens = 30;
  Index prompt = 20;
  std::initializer_list<Range> pictures = {{4, 12}};
  std::vector<Index> windows = {0, 0};  ///< of each layer
  bool all_equal = false;               ///< every query and key is the same: ties only
};

/// A qkv trace of four query heads and two KV heads.
MemoryTrace recomputed_trace(const Recomputed& shape) {
  const std::vector<Rows> of_layer(4, Rows{{1.0f}});
  MemoryTrace trace = attention_trace(std::vector<std::vector<Rows>>(shape.windows.size(), of_layer), 2,
                                      shape.prompt, pictures(shape.tokens, shape.pictures));
  trace.info.payload = Payload::qkv;
  trace.info.scale = 0.5;
  trace.info.rotary = Rotary{{1.0, 0.1, 0.01, 0.001}, false};
  trace.attention.clear();
  add_values(trace);
  for (Index layer = 0; layer < trace.info.layers; ++layer) {
    trace.info.masks[at(layer)].window = shape.windows[at(layer)];
    const auto fill = [&](std::vector<float>& numbers, Index heads, Index salt) {
      for (Index i = 0; i < heads * shape.tokens * 8; ++i) {
        numbers.push_back(shape.all_equal ? 1.0f : 2.0f * irregular(i, layer + salt));
      }
    };
    fill(trace.queries.emplace_back(), 4, 3);
    fill(trace.unrotated_queries.emplace_back(), 4, 9);
    fill(trace.keys.emplace_back(), 2, 5);
  }
  return trace;
}

/// Traces at the edges: sizes around a warp, ties only, no text, no picture, one token, no decode step,
/// masked rows.
std::map<std::string, MemoryTrace> traces() {
  const auto uneven = [](Index i, Index j) {
    return 1.0 + std::fmod(static_cast<double>(i * 7 + j * j * 3), 11.0);
  };
  const auto ties = [](Index, Index) { return 1.0; };
  std::map<std::string, MemoryTrace> all;
  for (const Index tokens : {31, 32, 33, 65}) {
    const Rows rows = rows_of(tokens, uneven);
    all["uneven " + std::to_string(tokens)] =
        attention_trace({{rows, rows, rows, rows}, {rows, rows, rows, rows}}, 2, tokens - 9,
                        pictures(tokens, {{2, 8}, {10, 14}}));
  }
  all["ties only"] = attention_trace({rows_of(24, ties), rows_of(24, ties)}, 16, pictures(24, {{0, 9}}));
  all["no picture"] = attention_trace({rows_of(20, uneven)}, 10, pictures(20, {}));
  all["no text"] = attention_trace({rows_of(12, uneven)}, 12, pictures(12, {{0, 12}}));
  all["one token"] = attention_trace({rows_of(1, ties)}, 1, pictures(1, {}));
  all["prompt only"] = attention_trace({rows_of(18, uneven)}, 18, pictures(18, {{3, 9}}));
  all["prompt of one token"] = attention_trace({rows_of(14, uneven)}, 1, pictures(14, {}));
  Rows masked = rows_of(16, uneven);
  for (const std::size_t row : {2U, 5U, 12U}) {
    std::ranges::fill(masked[row], 0.0f);
  }
  all["masked rows"] = attention_trace({masked, masked}, 9, pictures(16, {{1, 5}}));
  for (auto& [name, trace] : all) {
    add_values(trace);
  }
  all["recomputed"] = recomputed_trace({});
  all["recomputed, with a window"] = recomputed_trace({.windows = {0, 6}});
  all["recomputed, windows only"] = recomputed_trace({.tokens = 70, .prompt = 40, .windows = {5, 33}});
  all["recomputed, ties only"] = recomputed_trace({.all_equal = true});
  all["recomputed, two pictures"] =
      recomputed_trace({.tokens = 66, .prompt = 50, .pictures = {{2, 20}, {25, 31}}, .windows = {0, 0, 0}});
  all["recomputed, no picture"] = recomputed_trace({.pictures = {}, .windows = {0}});
  all["recomputed, prompt only"] = recomputed_trace({.tokens = 33, .prompt = 33});
  all["recomputed, one token"] = recomputed_trace({.tokens = 1, .prompt = 1, .pictures = {}});
  return all;
}

/// Whether a spec has every option that must be given, a budget apart.
bool is_complete(const std::string& spec) {
  try {
    (void)reference::make_policy(spec);
    return true;
  } catch (const ConfigError&) {
    return false;
  }
}

/// Options with which policies that protect many tokens fit into the smallest budget.
std::string small(const reference::PolicyInfo& info) {
  if (info.name == "h2o/ov-block") {
    return ",window=2,block=2,sinks=2,recent=2";
  }
  const auto has = [&](std::string_view key, std::string_view default_value) {
    return std::ranges::any_of(info.options, [&](const auto& option) {
      return option.key == key && (default_value.empty() || option.default_value == default_value);
    });
  };
  return std::string(has("window", "") ? ",window=2" : "") + (has("recent", "10") ? ",sinks=1,recent=2" : "");
}

/// Every policy by its bare name where that is enough, and with small and large budgets where it has one.
std::vector<std::string> specs() {
  std::vector<std::string> all;
  for (const reference::PolicyInfo& info : reference::policies()) {
    const std::string name(info.name);
    const bool required = std::ranges::any_of(info.options, [](const auto& option) {
      return option.key == "budget" && option.default_value == "-";
    });
    if (!is_complete(name)) {
      continue;  // Another option is required: specs of it stand below.
    }
    if (!required) {
      all.push_back(name);
    }
    if (reference::make_policy(name)->budget_is_open()) {
      for (const char* budget : {"5", "11", "30%", "1000"}) {
        all.push_back(name + ":budget=" + budget + small(info));
      }
    }
  }
  for (const char* extra :
       {"fastv:layer=1,keep=3", "fastv:layer=1,keep=50%,scope=image,effect=after",
        "fastv/text-mean:layer=1,keep=2", "sparsevlm:layers=1,keep=2",
        "mustdrop:layers=0/1,tau_global=0.15,tau_individual=0.2", "lookm:budget=9,recent=2",
        "lookm:budget=9,recent=3,merge=mean", "lookm:budget=5,recent=1,merge=weighted",
        "lookm:budget=12,recent=2,merge=pivot", "tome/decoder:keep=3", "tome/decoder:keep=30%",
        "hae:r=0.2,alpha=0.9,ddes=batch,bin=3,budget=6", "hae:r=0.2,alpha=0.9,effect=after,bin=2,budget=5",
        "hae:dap=mass,eps=0.3,lane=kv_head,budget=6,score=mean,scores=full",
        "h2o/history:budget=6,sinks=0,recent=1,history=3,indicator=yes,group=max",
        "h2o/ov-block:budget=9,block=3,sinks=0,recent=3,pool=2,norm=norm_sum",
        "scissorhands:budget=6,sinks=1,recent=1,select=sample,lane=layer",
        "nacl:budget=7,sinks=1,recent=1,random=3,temperature=0", "streaming:sinks=1,recent=4"}) {
    all.emplace_back(extra);
  }
  return all;
}

/// The traces that have what the policy needs, and on which its options are possible.
std::map<std::string, MemoryTrace> traces_for(const std::string& spec) {
  std::map<std::string, MemoryTrace> fit = traces();
  std::erase_if(fit, [&](const auto& entry) {
    try {
      return !testing::possible_run(entry.second, spec).has_value();
    } catch (const NeedsError&) {
      return true;
    }
  });
  return fit;
}

TEST(Conformance, RunsEveryPolicyOfTheTableOnMostTraces) {
  std::set<std::string> unseen;
  for (const reference::PolicyInfo& info : reference::policies()) {
    unseen.emplace(info.name);
  }
  const std::size_t all = traces().size();
  std::size_t runs = 0;
  for (const std::string& spec : specs()) {
    const std::size_t fit = traces_for(spec).size();
    // Eight traces of the edges carry keys; a share of the smallest prompts is less than some policies
    // protect.
    EXPECT_GE(fit, 7u) << spec;
    runs += fit;
    unseen.erase(std::string(reference::Options::name_of(spec)));
  }
  EXPECT_THAT(unseen, ::testing::IsEmpty());
  std::cout << reference::policies().size() << " policies, " << specs().size() << " specs x " << all
            << " traces: " << runs << " runs a property\n";
}

class PolicyContract : public ::testing::TestWithParam<std::string> {};

bool same(std::span<const double> a, std::span<const double> b) {
  return std::ranges::equal(a, b,
                            [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); });
}

void expect_equal(const RunResult& a, const RunResult& b, const std::string& what) {
  EXPECT_EQ(a.log, b.log) << what;
  for (const Metric metric : kMetrics) {
    if (a.merges != b.merges && metric != Metric::output_error) {
      continue;  // A log in which nothing was merged does not say that its policy merges.
    }
    EXPECT_TRUE(same(a.decode.all(metric), b.decode.all(metric))) << what << ": " << name(metric);
    EXPECT_TRUE(same(a.prefill.all(metric), b.prefill.all(metric))) << what << ": " << name(metric);
  }
}

TEST_P(PolicyContract, ReplayingTwiceGivesTheSameLog) {
  for (const auto& [name, trace] : traces_for(GetParam())) {
    expect_equal(testing::run(trace, GetParam()), testing::run(trace, GetParam()), name);
  }
}

TEST_P(PolicyContract, TheSizeOfABlockChangesNothing) {
  for (const auto& [name, trace] : traces_for(GetParam())) {
    const RunResult whole = testing::run(trace, GetParam());
    for (const Index rows : {1, 2, 7, 64}) {
      ReplayOptions options;
      options.block_rows = rows;
      expect_equal(testing::run(trace, GetParam(), options), whole,
                   name + ", blocks of " + std::to_string(rows));
    }
  }
}

TEST_P(PolicyContract, OneSequenceAfterAnotherIsForgotten) {
  // The same policy object over all traces, in both orders.
  const std::vector<std::shared_ptr<const Policy>> policy = {reference::make_policy(GetParam())};
  const std::map<std::string, MemoryTrace> all = traces_for(GetParam());
  const auto replay_one = [&](const MemoryTrace& trace) {
    testing::MemorySequence sequence(trace);
    return replay(sequence, policy, {}, "memory").front().log;
  };
  std::map<std::string, EvictionLog> forwards;
  for (const auto& [name, trace] : all) {
    forwards[name] = replay_one(trace);
  }
  for (auto entry = all.rbegin(); entry != all.rend(); ++entry) {
    EXPECT_EQ(replay_one(entry->second), forwards[entry->first]) << entry->first;
  }
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

TEST_P(PolicyContract, EveryRowIsMeasuredAndFinite) {
  for (const auto& [name, trace] : traces_for(GetParam())) {
    const RunResult result = testing::run(trace, GetParam());
    const auto numbers = [&](Metric metric) {
      return std::ranges::count_if(result.decode.all(metric),
                                   [](double x) { return std::isfinite(x) && x >= 0.0; });
    };
    const Index rows = trace.info.layers * trace.info.query_heads * trace.info.steps();
    const Index measured = rows - masked_decode_rows(trace);
    if (result.merges) {  // It has output errors alone.
      EXPECT_EQ(numbers(Metric::missed_mass), 0) << name;
      EXPECT_EQ(numbers(Metric::output_error) + result.removed_all_rows, measured) << name;
      continue;
    }
    EXPECT_EQ(numbers(Metric::missed_mass), measured) << name;
    EXPECT_EQ(numbers(Metric::missed_pull), measured) << name;
    EXPECT_LE(std::ranges::count_if(result.decode.all(Metric::missed_mass), [](double m) { return m > 1.0; }),
              0)
        << name;
    const Index with_mass = numbers(Metric::kl);
    EXPECT_LE(measured - with_mass, result.removed_all_rows) << name;
    EXPECT_EQ(numbers(Metric::output_error), with_mass) << name;
    EXPECT_EQ(numbers(Metric::output_error_relative), with_mass) << name;
  }
}

TEST_P(PolicyContract, ItsLogDrivesTheSameRun) {
  for (const auto& [name, trace] : traces_for(GetParam())) {
    const RunResult result = testing::run(trace, GetParam());
    testing::MemorySequence sequence(trace);
    const auto log = logged_policy({"log", {}, "run.h5", result.lanes, result.log});
    expect_equal(replay(sequence, {log}, {}, "memory").front(), result, name);
  }
}

/// The spec without its budget.
std::string without_budget(const std::string& spec) {
  return std::regex_replace(std::regex_replace(spec, std::regex("budget=[^,]*,?"), ""), std::regex("[:,]$"),
                            "");
}

/// Specs of policies that have a budget, whatever it is in the spec.
std::vector<std::string> budgeted_specs() {
  std::vector<std::string> budgeted = specs();
  std::erase_if(budgeted, [](const std::string& spec) {
    return !reference::make_policy(without_budget(spec))->budget_is_open();
  });
  return budgeted;
}

class BudgetContract : public ::testing::TestWithParam<std::string> {};

/// Whether no row after the step of its eviction sees the token.
bool is_out_of_sight(const SequenceInfo& info, const LogEntry& entry) {
  const Index window = info.masks[at(entry.layer)].window;
  return window > 0 && entry.token <= info.prompt + entry.step - window;
}

TEST_P(BudgetContract, ABudgetOfAllTokensEvictsWhatIsPrunedOrOutOfSight) {
  const auto policy = reference::make_policy(without_budget(GetParam()));
  for (const auto& [name, trace] : traces_for(GetParam())) {
    testing::MemorySequence sequence(trace);
    const RunResult result =
        replay(sequence, {policy->with_budget(trace.info.tokens + 8)}, {}, "memory").front();
    for (const LogEntry& entry : result.log.entries) {
      const bool is_pruned = policy->prunes() && entry.step == 0 && trace.info.is_visual(entry.token);
      EXPECT_TRUE(is_pruned || is_out_of_sight(trace.info, entry)) << name;
    }
  }
}

TEST_P(BudgetContract, ABudgetAboveALayersWindowIsCappedWithoutLoss) {
  const auto policy = reference::make_policy(without_budget(GetParam()));
  const MemoryTrace trace = recomputed_trace({.tokens = 70, .prompt = 40, .windows = {5, 33}});
  testing::MemorySequence sequence(trace);
  const RunResult result = replay(sequence, {policy->with_budget(40)}, {}, "memory").front();
  const Index lanes = lane_count(trace.info, result.lanes);
  for (const Index layer : {0, 1}) {
    EXPECT_THAT(result.warnings, ::testing::Contains(::testing::AllOf(
                                     ::testing::StartsWith("layer " + std::to_string(layer) + ":"),
                                     ::testing::HasSubstr("the budget is capped at"))));
    for (Index lane = 0; lane < lanes; ++lane) {
      const Limits& limits = result.limits[at(layer * lanes + lane)];
      // Beside sinks one token less: the next row does not see the oldest.
      const Index window = trace.info.masks[at(layer)].window;
      EXPECT_EQ(limits.budget, limits.sinks + window - (limits.sinks > 0 ? 1 : 0));
      EXPECT_EQ(limits.capacity, limits.budget);
    }
  }
  const std::span<const double> missed = result.decode.all(Metric::missed_mass);
  if (!policy->prunes() && !policy->merges()) {
    EXPECT_THAT(missed, ::testing::Each(0.0));
  }
}

TEST_P(BudgetContract, SizesAreWhatARunHolds) {
  const auto policy = reference::make_policy(without_budget(GetParam()));
  for (const auto& [name, trace] : traces_for(GetParam())) {
    if (policy->prunes() || trace.info.steps() == 0) {
      continue;  // How many tokens a pruning leaves depends on the trace.
    }
    for (const Index budget : {6, 13, 40}) {
      std::vector<std::optional<LaneSizes>> sizes;
      for (Index layer = 0; layer < trace.info.layers; ++layer) {
        sizes.push_back(policy->sizes(trace.info, layer, budget, trace.info.prompt));
      }
      if (std::ranges::any_of(sizes, [](const auto& s) { return !s; })) {
        continue;
      }
      testing::MemorySequence sequence(trace);
      const RunResult result = replay(sequence, {policy->with_budget(budget)}, {}, "memory").front();
      const Index lanes = lane_count(trace.info, result.lanes);
      for (Index layer = 0; layer < trace.info.layers; ++layer) {
        const auto begin = result.attention_tokens.begin() + layer * lanes * trace.info.steps();
        const Index held = std::accumulate(begin, begin + lanes * trace.info.steps(), Index{0});
        // Rounding may give lanes that share a budget some tokens more or fewer.
        const Index slack = GetParam().starts_with("adakv") ? lanes * trace.info.steps() : 0;
        EXPECT_LE(std::abs(held - lanes * sizes[at(layer)]->total), slack) << name << ", budget " << budget;
      }
    }
  }
}

std::string test_name(const ::testing::TestParamInfo<std::string>& parameter) {
  std::string name = parameter.param;
  std::ranges::replace_if(
      name, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; }, '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Table, PolicyContract, ::testing::ValuesIn(specs()), test_name);
INSTANTIATE_TEST_SUITE_P(Table, BudgetContract, ::testing::ValuesIn(budgeted_specs()), test_name);

}  // namespace
}  // namespace hae
