#pragma once

#include <boost/multiprecision/cpp_int.hpp>

namespace hae::testing {

/// Arithmetic without rounding: every double is one of these.
using Exact = boost::multiprecision::cpp_rational;

inline Exact power(const Exact& base, long exponent) {
  Exact result = 1;
  for (long i = 0; i < exponent; ++i) {
    result *= base;
  }
  return result;
}

}  // namespace hae::testing
