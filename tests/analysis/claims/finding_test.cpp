#include "analysis/claims/finding.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace hae::analysis {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
using Relation = Finding::Relation;

TEST(Finding, HoldsUpToItsRoundingAndNoFarther) {
  EXPECT_TRUE((Finding{"", Relation::at_most, 1.0, 1.0, 0.0, 1}.holds()));
  EXPECT_TRUE((Finding{"", Relation::at_most, 1.25, 1.0, 0.25, 1}.holds()));
  EXPECT_EQ((Finding{"", Relation::at_most, 1.5, 1.0, 0.25, 1}.verdict()), Verdict::fails);
}

TEST(Finding, BelowIsStrict) {
  EXPECT_EQ((Finding{"", Relation::below, 1.0, 1.0, 0.0, 1}.verdict()), Verdict::fails);
  EXPECT_TRUE((Finding{"", Relation::below, 1.0, 1.0, 0.25, 1}.holds()));
  EXPECT_EQ((Finding{"", Relation::below, 1.25, 1.0, 0.25, 1}.verdict()), Verdict::fails);
}

TEST(Finding, AnIdentityFailsOnBothSides) {
  EXPECT_TRUE((Finding{"", Relation::equal, 0.75, 1.0, 0.25, 1}.holds()));
  EXPECT_EQ((Finding{"", Relation::equal, 0.5, 1.0, 0.25, 1}.verdict()), Verdict::fails);
  EXPECT_EQ((Finding{"", Relation::equal, 1.5, 1.0, 0.25, 1}.verdict()), Verdict::fails);
}

TEST(Finding, ANanFailsAndAnInfiniteBoundHolds) {
  EXPECT_EQ((Finding{"", Relation::at_most, kNan, 1.0, 0.25, 1}.verdict()), Verdict::fails);
  EXPECT_EQ((Finding{"", Relation::at_most, 0.0, 1.0, kNan, 1}.verdict()), Verdict::fails);
  EXPECT_TRUE((Finding{"", Relation::at_most, 1.0, kInfinity, kInfinity, 1}.holds()));
}

TEST(Finding, SaysNothingWhereAnAssumptionIsNotMet) {
  const Finding finding{"the prompt has no text row", Relation::at_most, 2.0, 1.0, 0.0, 1};
  EXPECT_EQ(finding.verdict(), Verdict::does_not_apply);
  EXPECT_FALSE(finding.holds());
  EXPECT_EQ(finding.slack(), -1.0);
}

TEST(Finding, TheWorseOfTwoFailsElseAppliesElseHasLessToSpare) {
  const Finding fails{"", Relation::at_most, 2.0, 1.0, 0.0, 1};
  const Finding holds{"", Relation::at_most, 0.0, 1.0, 0.0, 2};
  const Finding closer{"", Relation::at_most, 0.5, 1.0, 0.25, 4};
  const Finding silent{"no row", Relation::at_most, 9.0, 1.0, 0.0, 8};
  EXPECT_EQ(worse(fails, holds).measured, 2.0);
  EXPECT_EQ(worse(holds, fails).measured, 2.0);
  EXPECT_EQ(worse(holds, silent).verdict(), Verdict::holds);
  EXPECT_EQ(worse(silent, fails).verdict(), Verdict::fails);
  EXPECT_EQ(worse(holds, closer).measured, 0.5);  // 0.5 + 0.25 is left, not 1
  EXPECT_EQ(worse(fails, holds).cases, 3);
  EXPECT_EQ(worse(silent, holds).cases, 2);
}

TEST(Finding, OfTwoThatFailNanIsTheWorse) {
  const Finding fails{"", Relation::at_most, 2.0, 1.0, 0.0, 1};
  const Finding unknown{"", Relation::at_most, kNan, 1.0, 0.0, 1};
  EXPECT_TRUE(std::isnan(worse(unknown, fails).measured));
  EXPECT_TRUE(std::isnan(worse(fails, unknown).measured));
}

// n u / (1 - n u): with n = 2^51, n u = 1/4, so 1/3.
TEST(Finding, RoundingOfManyOperationsIsNotBelowHighamsGamma) {
  EXPECT_EQ(rounding_of(0), 0.0);
  EXPECT_GE(rounding_of(1), 0x1p-53 / (1.0 - 0x1p-53));
  EXPECT_GE(rounding_of(Index{1} << 51), 1.0 / 3.0);
  EXPECT_LT(rounding_of(Index{1} << 51), 1.0 / 3.0 + 1e-14);
  EXPECT_THROW(rounding_of(Index{1} << 52), ContractViolation);
}

}  // namespace
}  // namespace hae::analysis
