#include "analysis/interval.hpp"

#include <algorithm>
#include <boost/math/distributions/binomial.hpp>
#include <boost/math/distributions/students_t.hpp>
#include <cmath>
#include <numeric>
#include <vector>

namespace hae::analysis {

std::optional<Interval> mean_interval(std::span<const double> observations, double level) {
  if (observations.size() < 2) {
    return std::nullopt;
  }
  const auto n = static_cast<double>(observations.size());
  const double mean = std::accumulate(observations.begin(), observations.end(), 0.0) / n;
  double squares = 0.0;
  for (const double x : observations) {
    squares += (x - mean) * (x - mean);
  }
  const boost::math::students_t distribution(n - 1.0);
  const double t = boost::math::quantile(distribution, 1.0 - (1.0 - level) / 2.0);
  const double half_width = t * std::sqrt(squares / (n - 1.0) / n);
  return Interval{mean, mean - half_width, mean + half_width};
}

Interval share_interval(Index successes, Index trials, double level) {
  HAE_EXPECTS(trials >= 1 && successes >= 0 && successes <= trials && level > 0.0 && level < 1.0);
  using Binomial = boost::math::binomial_distribution<>;
  const auto n = static_cast<double>(trials);
  const auto k = static_cast<double>(successes);
  const double tail = (1.0 - level) / 2.0;
  return {k / n, Binomial::find_lower_bound_on_p(n, k, tail), Binomial::find_upper_bound_on_p(n, k, tail)};
}

namespace {

/// k of n observations.
Index conformal_rank(Index observations, double delta) {
  HAE_EXPECTS(delta > 0.0 && delta < 1.0);
  const double spared = std::floor(static_cast<double>(observations + 1) * delta);
  return observations + 1 - static_cast<Index>(spared);
}

}  // namespace

std::optional<double> conformal_bound(std::span<const double> losses, double delta) {
  HAE_EXPECTS(std::ranges::none_of(losses, [](double x) { return std::isnan(x); }));
  const Index rank = conformal_rank(std::ssize(losses), delta);
  if (rank > std::ssize(losses)) {
    return std::nullopt;
  }
  std::vector<double> sorted(losses.begin(), losses.end());
  std::ranges::nth_element(sorted, sorted.begin() + (rank - 1));
  return sorted[static_cast<std::size_t>(rank - 1)];
}

Index least_observations(double delta) {
  Index observations = static_cast<Index>(std::max(0.0, std::floor(1.0 / delta) - 2.0));
  while (conformal_rank(observations, delta) > observations) {
    ++observations;
  }
  return observations;
}

}  // namespace hae::analysis
