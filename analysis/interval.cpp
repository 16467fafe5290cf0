#include "analysis/interval.hpp"

#include <boost/math/distributions/students_t.hpp>
#include <cmath>
#include <numeric>

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

}  // namespace hae::analysis
