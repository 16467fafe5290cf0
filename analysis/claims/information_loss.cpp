#include "analysis/claims/information_loss.hpp"

#include <algorithm>
#include <boost/math/special_functions/expm1.hpp>
#include <boost/math/special_functions/log1p.hpp>
#include <boost/multiprecision/cpp_bin_float.hpp>
#include <cmath>
#include <limits>
#include <string>

namespace hae::analysis {
namespace {

/// 335 bits and a 32-bit exponent. An elementary function is right within a few units of 2^-334, relatively.
using Wide = boost::multiprecision::cpp_bin_float_100;

/// ln (1-λ)^age. No product of an initial score, a count and 1/λ exceeds 2^2162, so beyond e^-100000 nothing
/// is left that a double could tell from its least one; the error of the exponential stays below 2^-300.
Wide log_kept(const Decay& decay, const Wide& age) {
  const Wide log = age * boost::math::log1p(Wide(-decay.rate));
  const Wide least = -100'000;
  return log < least ? least : log;
}

/// A (1-λ)^age.
Wide attention_after(const Decay& decay, const Wide& age) {
  return decay.initial * exp(log_kept(decay, age));
}

/// Σ_{t=1..k} A (1-λ)^t.
Wide summed_loss_of(const Decay& decay, Index k) {
  const Wide rate = decay.rate;
  return decay.initial * (1 - rate) * -boost::math::expm1(log_kept(decay, k)) / rate;
}

/// The error of every formula here, relatively: some dozen operations on numbers that are right within
/// 2^-300. At age 0 there are only products, which are exact.
Wide error_at(Index age) {
  return age == 0 ? Wide(0) : ldexp(Wide(1), -200);
}

/// The least double that is not below a number formed with an error.
double rounded_up(const Wide& formed, const Wide& error) {
  const Wide least = formed * (1 + error);
  const double infinity = std::numeric_limits<double>::infinity();
  auto result = least.convert_to<double>();
  while (result < least) {
    result = std::nextafter(result, infinity);
  }
  while (result > 0.0 && std::nextafter(result, 0.0) >= least) {
    result = std::nextafter(result, 0.0);
  }
  return result;
}

/// The largest double that is not above it.
double rounded_down(const Wide& formed, const Wide& error) {
  const Wide most = formed * (1 - error);
  const double above = rounded_up(most, 0);
  return above <= most ? above : std::nextafter(above, 0.0);
}

/// The least index k >= 0 with predicate(k), for a predicate that stays true; none if it never is. The one
/// before it was tried and is false, so an answer is right there whatever errors do elsewhere.
template <typename Predicate>
std::optional<Index> first_index(const Predicate& predicate) {
  if (predicate(0)) {
    return 0;
  }
  Index low = 0;
  Index high = std::numeric_limits<Index>::max();
  if (!predicate(high)) {
    return std::nullopt;
  }
  while (high - low > 1) {
    const Index middle = low + (high - low) / 2;
    (predicate(middle) ? high : low) = middle;
  }
  return high;
}

void expect_decay(const Decay& decay) {
  HAE_EXPECTS(decay.initial > 0.0 && std::isfinite(decay.initial));
  HAE_EXPECTS(0.0 < decay.rate && decay.rate < 1.0);
}

void expect_threshold(const Decay& decay, double epsilon) {
  expect_decay(decay);
  HAE_EXPECTS(epsilon > 0.0 && std::isfinite(epsilon));
}

/// Σ of observed attention, ascending, against a bound that rests on attention_bound() of each of its terms.
class Observed {
 public:
  /// attention  at one age; not negative
  void add(double attention, Index age, double most) {
    HAE_EXPECTS(attention >= 0.0);
    if (attention > most && unmet_.empty()) {
      unmet_ = "attention at age " + std::to_string(age) + " exceeds the decay's A (1-λ)^t";
    }
    sum_ += attention;
    ++terms_;
  }

  /// Each term may exceed the decay by what attention_bound() rounds up, two u or one subnormal unit.
  [[nodiscard]] Finding against(double bound) const {
    const double rounding = rounding_of(terms_ + 2) * std::max(sum_, bound) +
                            static_cast<double>(terms_) * std::numeric_limits<double>::denorm_min();
    return {unmet_, Finding::Relation::at_most, sum_, bound, rounding, terms_};
  }

 private:
  std::string unmet_;
  double sum_ = 0.0;
  Index terms_ = 0;
};

}  // namespace

double attention_bound(const Decay& decay, Index age) {
  expect_decay(decay);
  HAE_EXPECTS(age >= 0);
  return rounded_up(attention_after(decay, age), error_at(age));
}

bool printed_premise(const Decay& decay, double epsilon, Index k) {
  expect_threshold(decay, epsilon);
  HAE_EXPECTS(k >= 0);
  return k <= log(Wide(epsilon) / decay.initial) / boost::math::log1p(Wide(-decay.rate));
}

Finding printed_theorem(const Decay& decay, double epsilon, Index k) {
  Finding finding;
  if (!printed_premise(decay, epsilon, k)) {
    finding.unmet = "k exceeds log(ε/A)/log(1-λ)";
  }
  finding.relation = Finding::Relation::below;
  finding.measured = rounded_down(summed_loss_of(decay, k), error_at(k));
  finding.bound = epsilon;
  finding.cases = k;
  return finding;
}

double summed_loss_bound(const Decay& decay, Index k) {
  expect_decay(decay);
  HAE_EXPECTS(k >= 0);
  return rounded_up(summed_loss_of(decay, k), error_at(k));
}

std::optional<Index> largest_age(const Decay& decay, double epsilon) {
  expect_threshold(decay, epsilon);
  const std::optional<Index> first_above =
      first_index([&](Index k) { return summed_loss_bound(decay, k) > epsilon; });
  return first_above ? std::optional(*first_above - 1) : std::nullopt;
}

double flush_loss_bound(const Decay& decay, Index tokens, Index k) {
  expect_decay(decay);
  HAE_EXPECTS(tokens >= 1 && k >= 0);
  return rounded_up(tokens * attention_after(decay, k), error_at(k));
}

std::optional<Index> least_wait(const Decay& decay, Index tokens, double epsilon) {
  expect_threshold(decay, epsilon);
  return first_index([&](Index k) { return flush_loss_bound(decay, tokens, k) <= epsilon; });
}

double future_loss_bound(const Decay& decay, Index tokens, Index k) {
  expect_decay(decay);
  HAE_EXPECTS(tokens >= 1 && k >= 0);
  const Wide first = Wide(k) + 1;  // an Index may not hold it
  return rounded_up(tokens * attention_after(decay, first) / decay.rate, error_at(1));
}

Index largest_bin(const Decay& decay, double epsilon, Index k) {
  expect_threshold(decay, epsilon);
  const std::optional<Index> first_above =
      first_index([&](Index tokens) { return tokens > 0 && future_loss_bound(decay, tokens, k) > epsilon; });
  return first_above ? *first_above - 1 : std::numeric_limits<Index>::max();
}

Finding summed_loss(const Decay& decay, std::span<const double> attention) {
  Observed observed;
  Index age = 0;
  for (const double a : attention) {
    ++age;
    observed.add(a, age, attention_bound(decay, age));
  }
  return observed.against(summed_loss_bound(decay, age));
}

Finding flush_loss(const Decay& decay, std::span<const double> attention, Index k) {
  const double most = attention_bound(decay, k);
  Observed observed;
  for (const double a : attention) {
    observed.add(a, k, most);
  }
  return observed.against(flush_loss_bound(decay, static_cast<Index>(attention.size()), k));
}

Finding future_loss(const Decay& decay, View<const double, 2> attention, Index k) {
  Observed observed;
  for (Index step = 0; step < attention.extent(1); ++step) {
    const Index age = k + 1 + step;
    const double most = attention_bound(decay, age);
    for (Index token = 0; token < attention.extent(0); ++token) {
      observed.add(attention[token][step], age, most);
    }
  }
  return observed.against(future_loss_bound(decay, attention.extent(0), k));
}

}  // namespace hae::analysis
