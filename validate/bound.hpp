#pragma once

#include <limits>

#include "validate/number.hpp"

namespace hae::validate {

/// The arithmetic that a kernel says it sums in, and what its roundings can lose. docs/validate.md derives
/// every bound from these.
class Arithmetic {
 public:
  explicit Arithmetic(const Format& format) : u_(format.unit_roundoff()), flush_(format.smallest_normal()) {}

  /// The format's unit roundoff, and the reference's own, which computes in long double.
  [[nodiscard]] double u() const { return u_ + kReference; }

  /// What a product or an exponential loses to underflow: flushing to zero is allowed while summing.
  [[nodiscard]] double flush() const { return flush_; }

  /// gamma_n = n u / (1 - n u): no n roundings, in whatever order, change a product or a sum of terms of one
  /// sign by more than this share. Higham (3.1), (4.4). Infinite when n u >= 1: there is no bound.
  [[nodiscard]] double gamma(double n) const {
    const double nu = n * u();
    return nu < 1 ? nu / (1 - nu) : std::numeric_limits<double>::infinity();
  }

 private:
  static constexpr double kReference = std::numeric_limits<long double>::epsilon() / 2;

  double u_;
  double flush_;
};

/// What storing a number of this size in a type can lose: u |x| + the smallest subnormal / 2, of the output
/// type. Gradual underflow is asked of what is stored.
[[nodiscard]] inline double store_error(Type type, double magnitude) {
  const Format format = format_of(type);
  return format.unit_roundoff() * magnitude + format.smallest_subnormal() / 2;
}

}  // namespace hae::validate
