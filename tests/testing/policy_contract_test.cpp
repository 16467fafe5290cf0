#include "testing/policy_contract.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "reference/policies.hpp"

// That the contract finds what each of its properties is about. Mistakes of whole policies: tests/consumer.

namespace hae::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

MakePolicy maker(const std::string& spec) {
  return [spec] { return reference::make_policy(spec); };
}

PolicyProperty property_named(const std::string& name) {
  std::vector<PolicyProperty> all = policy_contract();
  std::ranges::copy(budget_contract(), std::back_inserter(all));
  return *std::ranges::find(all, name, &PolicyProperty::name);
}

/// A policy of the table whose budget is another than it was given.
class OtherBudget final : public Policy {
 public:
  OtherBudget(std::string spec, Index added) : spec_(std::move(spec)), added_(added) {}
  [[nodiscard]] std::string spec() const override { return spec_; }
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> options() const override { return {}; }
  [[nodiscard]] Needs needs(const SequenceInfo& info, Index layer) const override {
    return reference::make_policy(spec_)->needs(info, layer);
  }
  [[nodiscard]] std::unique_ptr<Run> begin(const SequenceInfo& info) const override {
    return reference::make_policy(spec_)->begin(info);
  }
  [[nodiscard]] bool budget_is_open() const override { return true; }
  [[nodiscard]] std::shared_ptr<const Policy> with_budget(Index budget) const override {
    return reference::make_policy(spec_ +
                                  ":sinks=0,recent=" + std::to_string(std::max<Index>(1, budget + added_)));
  }

 private:
  std::string spec_;
  Index added_;
};

TEST(PolicyContract, FindsABudgetThatIsNotKept) {
  // It may keep all tokens and 8 more, and keeps three less than all.
  const auto make = [] { return std::make_shared<OtherBudget>("window", -11); };
  EXPECT_THAT([&] { check_property(property_named("ABudgetOfAllTokensLosesNothing"), make); },
              ThrowsMessage<ContractFailure>(HasSubstr("under a budget of all tokens {\"step\":")));
}

TEST(PolicyContract, FindsABudgetAboveAWindowThatNobodyReports) {
  // `window` keeps less than it was told, which fits into every window, so it has nothing to report.
  const auto make = [] { return std::make_shared<OtherBudget>("window", -11); };
  EXPECT_THAT([&] { check_property(property_named("ABudgetAboveAWindowIsReported"), make); },
              ThrowsMessage<ContractFailure>(HasSubstr("and no warning says so")));
}

TEST(PolicyContract, RefusesToPassWhatWasNotPutToTheTest) {
  EXPECT_THAT([] { check_evictions(maker("full")); },
              ThrowsMessage<ContractFailure>(StartsWith("nothing was evicted on any trace")));
  EXPECT_NO_THROW(check_evictions(maker("full"), {.keeps_everything = true}));
  EXPECT_THAT([] { check_evictions(maker("greedy:budget=3"), {.keeps_everything = true}); },
              ThrowsMessage<ContractFailure>(HasSubstr("keeps_everything is said of a policy with")));
  EXPECT_THAT(
      [] { check_property(property_named("ItKeepsItsLimits"), maker("window:sinks=50,budget=100%")); },
      ThrowsMessage<ContractFailure>(HasSubstr("could run on 0 of 100 generated traces")));
}

TEST(PolicyContract, CollectsEveryFailureOfAPolicy) {
  EXPECT_NO_THROW(check_policy(maker("greedy:budget=3"), {.cases = 20}));
  const auto make = [] { return std::make_shared<OtherBudget>("window", -11); };
  try {
    check_policy(make, {.cases = 20});
    FAIL() << "nothing was found";
  } catch (const ContractFailure& failure) {
    // Without a size `window` runs nowhere; with one its budget is wrong.
    EXPECT_THAT(failure.what(), StartsWith("ReplayingTwiceGivesTheSameRun: "));
    EXPECT_THAT(failure.what(), HasSubstr("\n\nABudgetOfAllTokensLosesNothing: "));
  }
}

TEST(PolicyContract, GivesTheSameCounterexampleForASeed) {
  const auto message = [](std::uint64_t seed) {
    try {
      const auto make = [] { return std::make_shared<OtherBudget>("window", -11); };
      check_property(property_named("ABudgetOfAllTokensLosesNothing"), make, {.seed = seed});
    } catch (const ContractFailure& failure) {
      return std::string(failure.what());
    }
    return std::string();
  };
  EXPECT_EQ(message(1), message(1));
  EXPECT_NE(message(1), message(2));
}

}  // namespace
}  // namespace hae::testing
