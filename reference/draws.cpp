#include "reference/draws.hpp"

#include <cmath>

#include "sim/errors.hpp"

namespace hae::reference {

double natural_log(double x) {
  HAE_EXPECTS(std::isnormal(x) && x > 0.0);
  constexpr double kHalfRoot = 0x1.6a09e667f3bcdp-1;  // sqrt(1/2)
  constexpr double kLn2 = 0x1.62e42fefa39efp-1;
  int exponent = 0;
  double mantissa = std::frexp(x, &exponent);
  if (mantissa < kHalfRoot) {
    mantissa *= 2.0;
    --exponent;
  }
  // ln m = 2 artanh t = 2 (t + t^3/3 + t^5/5 + ..), |t| < 0.172: the first term left out is below 2^-66.
  const double t = (mantissa - 1.0) / (mantissa + 1.0);
  constexpr int kTerms = 12;
  double series = 0.0;
  for (int k = kTerms - 1; k > 0; --k) {
    series = (series + 1.0 / (2 * k + 1)) * (t * t);
  }
  return exponent * kLn2 + (2.0 * t + 2.0 * t * series);
}

double gumbel(std::uint64_t bits) {
  const double uniform = (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
  return -natural_log(-natural_log(uniform));
}

}  // namespace hae::reference
