#include "analysis/interval.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace hae::analysis {
namespace {

TEST(MeanInterval, IsStudentsInterval) {
  // (1, 2, 3): mean 2, s = 1, t(0.975, 2) = 4.302652729696 (tables), half width 4.302652729696 / √3
  // = 2.484137717.
  const Interval interval = *mean_interval(std::vector<double>{1.0, 2.0, 3.0});
  EXPECT_EQ(interval.mean, 2.0);
  EXPECT_NEAR(interval.high - 2.0, 2.484137717, 1e-8);
  EXPECT_NEAR(2.0 - interval.low, 2.484137717, 1e-8);
}

TEST(MeanInterval, OneObservationSaysNothingAboutSpread) {
  EXPECT_FALSE(mean_interval(std::vector<double>{5.0}).has_value());
  EXPECT_FALSE(mean_interval(std::vector<double>{}).has_value());
}

TEST(ShareInterval, IsClopperAndPearsons) {
  // 0 of n: [0, 1 - (α/2)^(1/n)]. 0 of 8 at 95 %: 1 - 0.025^(1/8) = 0.36942.
  const Interval none = share_interval(0, 8);
  EXPECT_EQ(none.mean, 0.0);
  EXPECT_EQ(none.low, 0.0);
  EXPECT_NEAR(none.high, 1.0 - std::pow(0.025, 1.0 / 8.0), 1e-12);
  const Interval all = share_interval(8, 8);
  EXPECT_NEAR(all.low, std::pow(0.025, 1.0 / 8.0), 1e-12);
  EXPECT_EQ(all.high, 1.0);
  // At its ends the tail has exactly half of what is left: 2 of 10, P(X >= 2 | low) = P(X <= 2 | high) =
  // 0.025, summed from the definition.
  const Interval some = share_interval(2, 10);
  const auto at_most = [](int k, double p) {
    double sum = 0.0;
    double binomial = 1.0;
    for (int i = 0; i <= k; ++i) {
      sum += binomial * std::pow(p, i) * std::pow(1.0 - p, 10 - i);
      binomial *= static_cast<double>(10 - i) / (i + 1);
    }
    return sum;
  };
  EXPECT_NEAR(1.0 - at_most(1, some.low), 0.025, 1e-9);
  EXPECT_NEAR(at_most(2, some.high), 0.025, 1e-9);
}

TEST(ConformalBound, IsAnOrderStatistic) {
  // n = 9, δ = 0.1: k = ⌈10 · 0.9⌉ = 9, the largest. n = 19: k = 18, the second largest.
  std::vector<double> losses;
  for (int i = 0; i < 9; ++i) {
    losses.push_back((i * 4) % 9);  // 0 .. 8 in some order
  }
  EXPECT_EQ(conformal_bound(losses, 0.1), 8.0);
  EXPECT_EQ(conformal_bound(losses, 0.5), 4.0);  // k = 5
  for (int i = 9; i < 19; ++i) {
    losses.push_back(i);
  }
  EXPECT_EQ(conformal_bound(losses, 0.1), 17.0);
}

TEST(ConformalBound, NeedsEnoughObservations) {
  EXPECT_EQ(least_observations(0.1), 9);
  EXPECT_EQ(least_observations(0.05), 19);
  EXPECT_EQ(least_observations(0.5), 1);
  EXPECT_FALSE(conformal_bound(std::vector<double>(8, 0.0), 0.1).has_value());
  EXPECT_TRUE(conformal_bound(std::vector<double>(9, 0.0), 0.1).has_value());
  for (const double delta : {0.01, 0.02, 0.07, 0.25, 0.3, 0.9}) {
    const Index n = least_observations(delta);
    EXPECT_TRUE(conformal_bound(std::vector<double>(at(n), 0.0), delta).has_value()) << delta;
    EXPECT_FALSE(conformal_bound(std::vector<double>(at(n - 1), 0.0), delta).has_value()) << delta;
  }
}

TEST(ConformalBound, HoldsAsOftenAsItSays) {
  // Of every permutation of n + 1 = 10 distinct losses the last is "new": it exceeds the bound of the others
  // exactly when its rank is above k = 9, in 1 of 10 places.
  Index exceeded = 0;
  for (int last = 0; last < 10; ++last) {
    std::vector<double> losses;
    for (int i = 0; i < 10; ++i) {
      if (i != last) {
        losses.push_back(i);
      }
    }
    exceeded += static_cast<double>(last) > *conformal_bound(losses, 0.1) ? 1 : 0;
  }
  EXPECT_EQ(exceeded, 1);
}

}  // namespace
}  // namespace hae::analysis
