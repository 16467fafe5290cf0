#include "reference/draws.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "sim/errors.hpp"

namespace hae::reference {
namespace {

TEST(NaturalLog, IsWithinFourUlpOfTheLogarithm) {
  for (int exponent = -60; exponent <= 60; ++exponent) {
    for (int i = 0; i < 200; ++i) {
      const double x = std::ldexp(1.0 + i / 200.0, exponent);
      const long double exact = std::log(static_cast<long double>(x));
      // Half of epsilon times a number is at most one ulp of it.
      const auto ulp = static_cast<long double>(std::numeric_limits<double>::epsilon() / 2) * std::abs(exact);
      EXPECT_LE(std::abs(natural_log(x) - exact), 4 * ulp) << x;
    }
  }
  // Close to 1 from both sides, where ln x is about x - 1.
  EXPECT_EQ(natural_log(1.0), 0.0);
  EXPECT_EQ(natural_log(1.0 - 0x1p-53), -0x1p-53);
  EXPECT_EQ(natural_log(1.0 + 0x1p-52), 0x1p-52);
}

TEST(NaturalLog, RefusesWhatHasNone) {
  for (const double x : {0.0, -1.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
    EXPECT_THROW(static_cast<void>(natural_log(x)), ContractViolation);
  }
}

TEST(Gumbel, IsMinusTheLogOfMinusTheLogOfAUniformNumber) {
  // bits = 2^63: u = 1/2 + 2^-53. At 1/2 it is -ln(ln 2) and its slope 2/ln 2 = 2.885, so 3.2e-16 more.
  EXPECT_NEAR(gumbel(std::uint64_t{1} << 63), 0.36651292058166432701, 1e-15);
  // The ends: u = 2^-53, -ln(53 ln 2) = -3.6037791039; u = 1 - 2^-53, -ln(2^-53) = 53 ln 2.
  EXPECT_NEAR(gumbel(0), -std::log(53 * std::log(2.0)), 1e-14);
  EXPECT_NEAR(gumbel(~std::uint64_t{0}), 53 * std::log(2.0), 1e-13);
}

}  // namespace
}  // namespace hae::reference
