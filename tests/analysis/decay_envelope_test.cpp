#include "analysis/decay_envelope.hpp"

#include <gtest/gtest.h>
// RapidCheck needs GoogleTest first.
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>

namespace hae::analysis {
namespace {

/// R3's bound for one token, A (1-λ) / λ.
double left_to_lose(const Decay& decay) {
  return future_loss_bound(decay, 1, 0);
}

/// The least A for a rate, and its R3 bound, by the definition: what any search must not beat.
double left_to_lose_at(double rate, const std::vector<double>& largest) {
  double bound = 0.0;
  for (std::size_t i = 0; i < largest.size(); ++i) {
    bound = std::max(bound, largest[i] * std::pow(1.0 - rate, -static_cast<double>(i)) / rate);
  }
  return bound;
}

TEST(DecayEnvelope, IsTheDecayOfAttentionThatDecays) {
  // M(t) = 2^-t: A = 1, λ = 1/2 bounds each age exactly, and then R3's bound is 1. Steeper does not bound it:
  // the corner at t = 8 has its own minimum at q = 7/8, to the right of the slope, 1/2.
  std::vector<double> halves;
  for (int t = 1; t <= 8; ++t) {
    halves.push_back(std::ldexp(1.0, -t));
  }
  // f(q) = max(q^0 / 2, ..., 2^-8 q^-7) / (1 - q): for q >= 1/2 the first, (1/2)/(1-q), which grows; for
  // q <= 1/2 the last, 2^-8 q^-7/(1-q), which falls until q = 7/8. So the minimum is at q = 1/2, where f = 1.
  const Decay decay = *decay_envelope(halves);
  EXPECT_NEAR(decay.rate, 0.5, 1e-14);
  EXPECT_NEAR(decay.initial, 1.0, 1e-13);
  EXPECT_NEAR(left_to_lose(decay), 1.0, 1e-13);
}

TEST(DecayEnvelope, OfOneAgeTakesTheMinimumOfItsTerm) {
  // Only M(4) = 0.1: f(q) = 0.1 q^-3 / (1-q) is least at q = 3/4: 0.1 · 64/27 · 4 = 0.948148...
  const Decay decay = *decay_envelope(std::vector<double>{0.0, 0.0, 0.0, 0.1});
  EXPECT_NEAR(decay.rate, 0.25, 1e-14);
  EXPECT_NEAR(left_to_lose(decay), 0.1 * 64.0 / 27.0 * 4.0, 1e-13);
}

TEST(DecayEnvelope, OfTheFirstAgeAloneComesNearItsLeastBound) {
  const Decay decay = *decay_envelope(std::vector<double>{0.25, 0.0});
  EXPECT_EQ(decay.rate, std::nextafter(1.0, 0.0));
  EXPECT_NEAR(left_to_lose(decay), 0.25, 1e-15);
}

TEST(DecayEnvelope, OfAttentionThatGrowsStillDecays) {
  // M = (0.1, 0.2, 0.4): the hull's slopes are ln 2 > 0, so t = 3 is the largest term for all u < 0: q = 2/3.
  const Decay decay = *decay_envelope(std::vector<double>{0.1, 0.2, 0.4});
  EXPECT_NEAR(decay.rate, 1.0 / 3.0, 1e-14);
  EXPECT_NEAR(left_to_lose(decay), 0.4 * 9.0 / 4.0 * 3.0, 1e-13);
}

TEST(DecayEnvelope, OfNothingIsNone) {
  EXPECT_FALSE(decay_envelope({}).has_value());
  EXPECT_FALSE(decay_envelope(std::vector<double>{0.0, 0.0}).has_value());
  EXPECT_THROW(decay_envelope(std::vector<double>{-0.5}), ContractViolation);
  EXPECT_THROW(decay_envelope(std::vector<double>{std::nan("")}), ContractViolation);
}

TEST(DecayEnvelope, AttentionOfExactlyTheBoundIsNoExcess) {
  const Decay decay = {0.3, 0.7};
  const std::vector<double> bounds = {attention_bound(decay, 1), attention_bound(decay, 2)};
  EXPECT_FALSE(excess_over(decay, bounds).has_value());
  const std::vector<double> above = {bounds[0], std::nextafter(bounds[1], 1.0)};
  EXPECT_EQ(excess_over(decay, above)->age, 2);
}

TEST(DecayEnvelope, ExcessNamesTheWorstAge) {
  // A = 1, λ = 1/2 allows 1/2, 1/4, 1/8.
  const std::optional<Excess> excess = excess_over({1.0, 0.5}, std::vector<double>{0.5, 0.5, 0.5});
  ASSERT_TRUE(excess.has_value());
  EXPECT_EQ(excess->age, 3);
  EXPECT_DOUBLE_EQ(excess->factor, 4.0);  // what is allowed is rounded up
  EXPECT_FALSE(excess_over({1.0, 0.5}, std::vector<double>{0.5, 0.25, 0.125}).has_value());
}

RC_GTEST_PROP(DecayEnvelopeProperty, BoundsEveryAgeAndNoOtherRateDoesBetter, ()) {
  // Attention over up to 60 ages: zeros, ties, float32's least numbers, outliers.
  const auto ages = *rc::gen::inRange<std::size_t>(1, 60);
  const auto element =
      rc::gen::oneOf(rc::gen::just(0.0), rc::gen::just(0x1p-149), rc::gen::just(0.25),
                     rc::gen::map(rc::gen::inRange(0, 1 << 20), [](int x) { return std::ldexp(x, -20); }),
                     rc::gen::map(rc::gen::inRange(0, 140), [](int e) { return std::ldexp(1.0, -e); }));
  const auto largest = *rc::gen::container<std::vector<double>>(ages, element);
  const std::optional<Decay> decay = decay_envelope(largest);
  const bool is_nothing = std::ranges::all_of(largest, [](double m) { return m == 0.0; });
  RC_ASSERT(decay.has_value() != is_nothing);
  if (!decay) {
    return;
  }
  for (std::size_t i = 0; i < largest.size(); ++i) {
    RC_ASSERT(largest[i] <= attention_bound(*decay, static_cast<Index>(i + 1)));
  }
  RC_ASSERT(!excess_over(*decay, largest).has_value());
  // Rates of a grid, and near the one that was found.
  const double found = left_to_lose(*decay) * (1.0 - 1e-9);
  for (int i = 1; i < 200; ++i) {
    RC_ASSERT(left_to_lose_at(i / 200.0, largest) >= found);
  }
  for (const double factor : {0.5, 0.9, 0.999, 1.001, 1.1}) {
    const double rate = decay->rate * factor;
    RC_ASSERT(rate >= 1.0 || left_to_lose_at(rate, largest) >= found);
  }
}

}  // namespace
}  // namespace hae::analysis
