#include "reference/options.hpp"

#include <gmock/gmock.h>

#include "reference/policies.hpp"

namespace hae::reference {
namespace {

using ::testing::HasSubstr;

TEST(Amount, SharesAreExactDecimalsRoundedDownToAtLeastOne) {
  // In binary 0.9 * 10 or 0.1 * 10 can miss a whole number; as decimals they cannot.
  EXPECT_EQ(Amount::parse("10%")->of(10), 1);
  EXPECT_EQ(Amount::parse("0.9")->of(10), 9);
  EXPECT_EQ(Amount::parse("0.1")->of(1000), 100);
  EXPECT_EQ(Amount::parse("0.29")->of(100), 29);  // 0.29 * 100 = 28.999999999999996 in double
  EXPECT_EQ(Amount::parse("15%")->of(147), 22);   // 22.05
  EXPECT_EQ(Amount::parse("0.5")->of(1), 1);
  EXPECT_EQ(Amount::parse("12.5%")->of(8), 1);
  EXPECT_EQ(Amount::parse("64")->of(3), 64);
}

TEST(Amount, RefusesWhatIsNeitherACountNorAShare) {
  for (const char* text :
       {"", "0", "0%", "0.0", "-1", "1e3", "x", "%", ".", "1.2.3", "1 ", "12345678901234567890"}) {
    EXPECT_FALSE(Amount::parse(text).has_value()) << text;
  }
}

std::string error_of(const std::string& spec) {
  try {
    make_policy(spec);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(PolicySpec, NamesTheKeyAndWhatIsAllowed) {
  EXPECT_THAT(error_of("h2o"), HasSubstr("unknown policy 'h2o'; expected one of hae, greedy, h2o/layerwise"));
  EXPECT_THAT(error_of("hae:colour=red"),
              HasSubstr("unknown option 'colour'; expected one of dap, r, alpha"));
  EXPECT_THAT(error_of("hae:r=0.1,r=0.2"), HasSubstr("'r' is given twice"));
  EXPECT_THAT(error_of("hae:=3"), HasSubstr("is not key=value"));
  EXPECT_THAT(error_of("hae:"), HasSubstr("is not key=value"));
  EXPECT_THAT(error_of("hae:bin"), HasSubstr("'bin' is not key=value"));
  EXPECT_THAT(error_of("hae:bin=0"), HasSubstr("bin=0 is not allowed; expected a count of 1 or more"));
  EXPECT_THAT(error_of("hae:budget=0"), HasSubstr("budget=0 is not allowed"));
  EXPECT_THAT(error_of("random:budget=prompt"), HasSubstr("budget=prompt is not allowed"));
  EXPECT_THAT(error_of("window:budget=-"), HasSubstr("budget=- is not allowed"));
  EXPECT_THAT(error_of("h2o/layerwise:budget=prompt"), HasSubstr("expected a count of 1 or more"));
  EXPECT_THAT(error_of("hae:budget=3.5"), HasSubstr("budget=3.5 is not allowed"));
  EXPECT_THAT(error_of("hae:r=nan"), HasSubstr("r=nan is not allowed"));
  EXPECT_THAT(error_of("hae:r=-1"), HasSubstr("r=-1 is not allowed"));
  EXPECT_THAT(error_of("hae:ddes=Mark"), HasSubstr("ddes=Mark is not allowed; expected mark, batch or none"));
  EXPECT_THAT(error_of("full:budget=3"), HasSubstr("unknown option 'budget'; it has none"));
}

TEST(PolicySpec, AnOptionWithoutMeaningIsAnError) {
  for (const char* option : {"budget=3", "bin=2", "recent=1", "group=max", "score=sum", "scores=full"}) {
    EXPECT_THAT(error_of(std::string("hae:ddes=none,") + option), HasSubstr("has no meaning with ddes=none"))
        << option;
  }
  for (const char* option : {"r=1", "alpha=1", "eps=1", "heads=max", "scope=image", "max_evicted=2",
                             "broadcast=all", "effect=after"}) {
    EXPECT_THAT(error_of(std::string("hae:dap=none,") + option), HasSubstr("has no meaning with dap=none"))
        << option;
    EXPECT_THAT(error_of(std::string("greedy:") + option), HasSubstr("has no meaning with dap=none"))
        << option;
  }
  EXPECT_THAT(error_of("hae:dap=mass,eps=0.1,r=0.1"), HasSubstr("has no meaning with dap=mass"));
  EXPECT_THAT(error_of("hae:eps=0.1"), HasSubstr("has no meaning with dap=threshold"));
  EXPECT_THAT(error_of("hae:broadcast=none,effect=within"), HasSubstr("has no meaning with broadcast=none"));
  EXPECT_THAT(error_of("hae:dap=mass"), HasSubstr("'eps' is required"));
  EXPECT_THAT(error_of("hae:group=max"), HasSubstr("needs lane=kv_head"));
  EXPECT_THAT(error_of("window:recent=3,budget=7"), HasSubstr("were both given"));
}

TEST(PolicySpec, CanonicalFormKeepsWhatWasGivenInTheTablesOrder) {
  EXPECT_EQ(make_policy("hae:bin=64,r=0.0015")->spec(), "hae:r=0.0015,bin=64");
  EXPECT_EQ(make_policy("greedy")->spec(), "greedy");
}

TEST(PolicySpec, OptionsListEveryDefaultAndDashWhatHasNoMeaning) {
  const auto options = make_policy("hae:ddes=none")->options();
  const auto value = [&](const std::string& key) {
    return std::ranges::find(options, key, &std::pair<std::string, std::string>::first)->second;
  };
  EXPECT_EQ(value("r"), "0.0015");
  EXPECT_EQ(value("alpha"), "0.0005");
  EXPECT_EQ(value("dap"), "threshold");
  EXPECT_EQ(value("bin"), "-");
  EXPECT_EQ(value("eps"), "-");
}

TEST(PolicySpec, AMatchedBudgetIsAnOptionOfTheRunButNotOfTheSpec) {
  const auto matched = make_policy("h2o/layerwise")->with_budget(12);
  EXPECT_EQ(matched->spec(), "h2o/layerwise");
  EXPECT_EQ(matched->options().front(), std::pair(std::string("budget"), std::string("12")));
  EXPECT_TRUE(make_policy("window")->budget_is_open());
  for (const char* spec :
       {"greedy:budget=3", "greedy:budget=prompt", "window:recent=9", "hae:ddes=none", "full"}) {
    EXPECT_FALSE(make_policy(spec)->budget_is_open()) << spec;
  }
}

}  // namespace
}  // namespace hae::reference
