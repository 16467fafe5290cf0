#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <iostream>
#include <numeric>
#include <optional>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "reference/policies.hpp"
#include "testing/edge_traces.hpp"
#include "testing/register_policy_contract.hpp"

// The contract of every policy of the table: a policy that is added to the table is tested before anyone
// writes a test for it.

namespace hae {
namespace {

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

testing::MakePolicy maker(const std::string& spec) {
  return [spec] { return reference::make_policy(spec); };
}

TEST(Conformance, RunsEveryPolicyOfTheTableOnMostTraces) {
  std::set<std::string> unseen;
  for (const reference::PolicyInfo& info : reference::policies()) {
    unseen.emplace(info.name);
  }
  const std::size_t all = testing::edge_traces().size();
  std::size_t runs = 0;
  for (const std::string& spec : specs()) {
    const std::size_t fit = testing::possible_edge_traces(maker(spec)).size();
    // Eight traces of the edges carry keys; a share of the smallest prompts is less than some policies
    // protect.
    EXPECT_GE(fit, 7u) << spec;
    runs += fit;
    unseen.erase(std::string(reference::Options::name_of(spec)));
  }
  EXPECT_THAT(unseen, ::testing::IsEmpty());
  std::cout << reference::policies().size() << " policies, " << specs().size() << " specs x " << all
            << " traces: " << runs << " runs on edge traces a property\n";
}

/// The spec without its budget.
std::string without_budget(const std::string& spec) {
  return std::regex_replace(std::regex_replace(spec, std::regex("budget=[^,]*,?"), ""), std::regex("[:,]$"),
                            "");
}

/// Specs with an open budget of the policies above that are given one.
std::set<std::string> open_specs() {
  std::set<std::string> open;
  for (const std::string& spec : specs()) {
    const std::string without = without_budget(spec);
    if (without != spec && reference::make_policy(without)->budget_is_open()) {
      open.insert(without);
    }
  }
  return open;
}

/// What the policies of the table promise of budgets beyond the contract.
class BudgetContract : public ::testing::TestWithParam<std::string> {};

TEST_P(BudgetContract, ABudgetAboveALayersWindowIsCappedWithoutLoss) {
  const auto policy = reference::make_policy(GetParam());
  const testing::MemoryTrace trace =
      testing::recomputed_trace({.tokens = 70, .prompt = 40, .windows = {5, 33}});
  const RunResult result = testing::run(trace, policy->with_budget(40));
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
  const auto policy = reference::make_policy(GetParam());
  for (const auto& [name, trace] : testing::possible_edge_traces(
           maker(GetParam() + (GetParam().find(':') == std::string::npos ? ':' : ',') + "budget=11"))) {
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
      const RunResult result = testing::run(trace, policy->with_budget(budget));
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

std::string identifier(std::string spec) {
  std::ranges::replace_if(
      spec, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; }, '_');
  return spec;
}

INSTANTIATE_TEST_SUITE_P(Table, BudgetContract, ::testing::ValuesIn(open_specs()),
                         [](const ::testing::TestParamInfo<std::string>& spec) {
                           return identifier(spec.param);
                         });

testing::ContractOptions options_for(const std::string& spec) {
  testing::ContractOptions options;
  options.cases = 40;
  const auto says = [&](const char* text) { return spec.find(text) != std::string::npos; };
  if (says("budget=30%")) {  // A share of a short prompt is less than many policies protect.
    options.traces.least_tokens = 30;
    options.traces.most_tokens = 60;
  }
  // The last two decide in layers that these traces do not have; specs with others stand above. What has a
  // budget evicts under any: windows cap it.
  options.keeps_everything = spec == "full" || spec == "sparsevlm" || spec == "mustdrop";
  return options;
}

void register_table() {
  for (const std::string& spec : specs()) {
    testing::register_policy_contract("Policy_" + identifier(spec), maker(spec), options_for(spec));
  }
  for (const std::string& spec : open_specs()) {
    testing::register_properties("OpenBudget_" + identifier(spec), testing::budget_contract(), maker(spec),
                                 options_for(spec));
  }
}

}  // namespace
}  // namespace hae

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  hae::register_table();
  return RUN_ALL_TESTS();
}
