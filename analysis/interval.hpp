#pragma once

#include <optional>
#include <span>

#include "sim/view.hpp"

namespace hae::analysis {

/// A mean, or a share, and a confidence interval around it.
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

/// The share of successes in independent trials, and its exact two-sided interval (Clopper and Pearson 1934):
/// whatever the true share is, the interval holds it with probability at least `level`.
///
/// successes  0 .. trials
/// trials     at least 1
/// level      in (0, 1)
Interval share_interval(Index successes, Index trials, double level = 0.95);

/// A bound on the loss of a sequence that was not seen, from losses of n others it is exchangeable with
/// (split conformal prediction; Vovk, Gammerman, Shafer 2005): the k-th smallest of them,
///
///   k = ⌈(n + 1)(1 - δ)⌉ = n + 1 - ⌊(n + 1) δ⌋
///
/// holds with probability at least 1 - δ over the n and the new one together.
///
/// losses   of independent groups; NaN is a contract violation
/// delta    in (0, 1)
/// order    the product (n + 1) δ is one in double, so that a decimal counts as what it says
/// returns  none if k > n: too few for this δ (least_observations)
std::optional<double> conformal_bound(std::span<const double> losses, double delta);

/// The fewest observations from which conformal_bound gives one.
Index least_observations(double delta);

}  // namespace hae::analysis
