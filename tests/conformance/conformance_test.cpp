#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <iostream>
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

std::string identifier(std::string spec) {
  std::ranges::replace_if(
      spec, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; }, '_');
  return spec;
}

testing::ContractOptions options_for(const std::string& spec) {
  testing::ContractOptions options;
  options.cases = 40;
  const auto says = [&](const char* text) { return spec.find(text) != std::string::npos; };
  if (says("budget=30%")) {  // A share of a short prompt is less than many policies protect.
    options.traces.least_tokens = 30;
    options.traces.most_tokens = 60;
  }
  // DAP's default thresholds are those of long prompts: they prune nothing here.
  const bool prunes = reference::make_policy(spec)->prunes() && !spec.starts_with("hae:");
  // The last two decide in layers that these traces do not have; specs with others stand above.
  const bool is_idle = spec == "full" || spec == "sparsevlm" || spec == "mustdrop";
  options.keeps_everything = is_idle || (says("budget=1000") && !prunes);
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
