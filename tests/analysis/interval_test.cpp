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

}  // namespace
}  // namespace hae::analysis
