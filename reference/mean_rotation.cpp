#include "reference/mean_rotation.hpp"

#include <array>
#include <cmath>

namespace hae::reference {
namespace {

/// Σ c_k x^k for c from the constant term up.
template <std::size_t Terms>
double polynomial(const std::array<double, Terms>& coefficients, double x) {
  double sum = 0.0;
  for (auto c = coefficients.rbegin(); c != coefficients.rend(); ++c) {
    sum = sum * x + *c;
  }
  return sum;
}

/// (-1)^k / (2k + first)!
template <std::size_t Terms>
constexpr std::array<double, Terms> alternating_factorials(int first) {
  std::array<double, Terms> terms{};
  double factorial = 1.0;
  for (std::size_t k = 0; k < Terms; ++k) {
    const double n = static_cast<double>(2 * k) + first;
    factorial = k == 0 ? 1.0 : factorial * n * (n - 1.0);
    terms[k] = (k % 2 == 0 ? 1.0 : -1.0) / factorial;
  }
  return terms;
}

}  // namespace

Turn turn_of(double angle) {
  constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;
  constexpr double kHalfPiHigh = 0x1.921fb544p+0;  // 33 bits: times a whole number below 2^20 it is exact
  constexpr double kHalfPiLow = 0x1.0b4611a626331p-34;  // the rest
  const double quarters = std::nearbyint(angle * kTwoOverPi);
  const double x = (angle - quarters * kHalfPiHigh) - quarters * kHalfPiLow;  // within [-pi/4, pi/4]
  constexpr std::size_t kTerms = 9;  // the first term left out is below 2^-58
  const double sine = x * polynomial(alternating_factorials<kTerms>(1), x * x);
  const double cosine = polynomial(alternating_factorials<kTerms>(0), x * x);
  switch (static_cast<Index>(quarters) & 3) {
    case 0:
      return {cosine, sine};
    case 1:
      return {-sine, cosine};
    case 2:
      return {-cosine, -sine};
    default:
      return {sine, -cosine};
  }
}

std::vector<Turn> mean_rotation(const Rotary& rotary, Index begin, Index count) {
  std::vector<Turn> mean;
  for (const double frequency : rotary.inverse_frequency) {
    Turn sum{0.0, 0.0};
    for (Index position = begin; position < begin + count; ++position) {
      const Turn turn = turn_of(static_cast<double>(position) * frequency);
      sum.cosine += turn.cosine;
      sum.sine += turn.sine;
    }
    mean.push_back({sum.cosine / static_cast<double>(count), sum.sine / static_cast<double>(count)});
  }
  return mean;
}

std::vector<double> turned_back(const View<const float, 1>& vector, const std::vector<Turn>& turns,
                                bool interleaved) {
  const auto pairs = static_cast<Index>(turns.size());
  std::vector<double> back(at(vector.extent(0)));
  for (Index i = 0; i < pairs; ++i) {
    const Index first = interleaved ? 2 * i : i;
    const Index second = interleaved ? 2 * i + 1 : i + pairs;
    const auto x = static_cast<double>(vector[first]);
    const auto y = static_cast<double>(vector[second]);
    const Turn& turn = turns[at(i)];
    back[at(first)] = turn.cosine * x + turn.sine * y;
    back[at(second)] = turn.cosine * y - turn.sine * x;
  }
  return back;
}

}  // namespace hae::reference
