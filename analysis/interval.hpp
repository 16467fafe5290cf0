#pragma once

#include <optional>
#include <span>

namespace hae::analysis {

/// A mean and a confidence interval around it.
struct Interval {
  double mean = 0;
  double low = 0;
  double high = 0;
};

/// Mean and two-sided Student t interval of independent observations:
///
///   mean ± t(1 - (1 - level)/2, n - 1) · s / √n,   s² = Σ (x - mean)² / (n - 1)
///
/// level    in (0, 1)
/// order    both sums in the order given, in double
/// returns  none for fewer than two observations: one says nothing about spread
std::optional<Interval> mean_interval(std::span<const double> observations, double level = 0.95);

}  // namespace hae::analysis
