#include "analysis/decay_envelope.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace hae::analysis {
namespace {

/// ln M(t) at age t.
struct Point {
  double age;
  double log;
};

/// Corners of the upper hull, ages ascending; slopes between them fall.
std::vector<Point> upper_hull(std::span<const double> largest) {
  std::vector<Point> hull;
  for (std::size_t i = 0; i < largest.size(); ++i) {
    HAE_EXPECTS(std::isfinite(largest[i]) && largest[i] >= 0.0);
    if (largest[i] == 0.0) {
      continue;
    }
    const Point p{static_cast<double>(i + 1), std::log(largest[i])};
    const auto lies_below = [&](const Point& a, const Point& b) {
      return (b.log - a.log) * (p.age - a.age) <= (p.log - a.log) * (b.age - a.age);
    };
    while (hull.size() >= 2 && lies_below(hull[hull.size() - 2], hull.back())) {
      hull.pop_back();
    }
    hull.push_back(p);
  }
  return hull;
}

/// u = ln(1-λ) where R3's bound is least. Left of a corner of age t the next older one is the larger term, so
/// the corner is the largest for u between the slopes on its right and on its left.
double best_log_kept(const std::vector<Point>& hull) {
  const double infinity = std::numeric_limits<double>::infinity();
  double left = infinity;
  for (std::size_t i = 0; i < hull.size(); ++i) {
    const double right =
        i + 1 == hull.size() ? -infinity : (hull[i + 1].log - hull[i].log) / (hull[i + 1].age - hull[i].age);
    // The corner's own term is least at q = (t-1)/t. The terms of older corners fall as u grows.
    const double own = hull[i].age == 1.0 ? -infinity : std::log1p(-1.0 / hull[i].age);
    if (own >= right) {
      return std::min(own, left);
    }
    left = right;
  }
  return left;
}

/// The least A, rounded up, that bounds every age.
double initial_for(double rate, std::span<const double> largest) {
  double initial = std::numeric_limits<double>::min();
  for (std::size_t i = 0; i < largest.size(); ++i) {
    const auto age = static_cast<double>(i + 1);
    initial = std::max(initial, largest[i] * std::exp(-age * std::log1p(-rate)));
  }
  while (const std::optional<Excess> excess = excess_over({initial, rate}, largest)) {
    initial = std::nextafter(initial * excess->factor, std::numeric_limits<double>::infinity());
  }
  return initial;
}

}  // namespace

std::optional<Decay> decay_envelope(std::span<const double> largest) {
  const std::vector<Point> hull = upper_hull(largest);
  if (hull.empty()) {
    return std::nullopt;
  }
  const double rate = std::clamp(-std::expm1(best_log_kept(hull)), std::numeric_limits<double>::min(),
                                 std::nextafter(1.0, 0.0));
  return Decay{initial_for(rate, largest), rate};
}

std::optional<Excess> excess_over(const Decay& decay, std::span<const double> largest) {
  std::optional<Excess> most;
  for (std::size_t i = 0; i < largest.size(); ++i) {
    const auto age = static_cast<Index>(i + 1);
    const double bound = attention_bound(decay, age);
    if (largest[i] > bound && (!most || largest[i] / bound > most->factor)) {
      most = Excess{age, largest[i] / bound};
    }
  }
  return most;
}

}  // namespace hae::analysis
