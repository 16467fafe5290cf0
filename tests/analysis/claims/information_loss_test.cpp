#include "analysis/claims/information_loss.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
// RapidCheck needs GoogleTest first.
#include <rapidcheck/gtest.h>

#include <boost/multiprecision/cpp_bin_float.hpp>
#include <cmath>
#include <limits>
#include <ostream>
#include <vector>

#include "testing/stream.hpp"
#include "tests/analysis/claims/exact.hpp"
#include "tests/support/interesting.hpp"

// T2.1 and what replaces it, against sums without rounding.

namespace hae::analysis {

std::ostream& operator<<(std::ostream& out, const Decay& decay) {
  return out << "A = " << decay.initial << ", λ = " << decay.rate;
}

namespace {

using testing::check_interesting;
using testing::Exact;
using testing::power;
using Wide = boost::multiprecision::cpp_bin_float_100;

constexpr Index kMost = std::numeric_limits<Index>::max();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLeast = std::numeric_limits<double>::denorm_min();

/// Σ_{t=1..k} A (1-λ)^t, term by term.
Exact brute_sum(const Decay& decay, Index k) {
  const Exact kept = 1 - Exact(decay.rate);
  Exact term = decay.initial;
  Exact sum = 0;
  for (Index t = 1; t <= k; ++t) {
    term *= kept;
    sum += term;
  }
  return sum;
}

Exact attention(const Decay& decay, Index age) {
  return decay.initial * power(1 - Exact(decay.rate), age);
}

double above(double x) {
  return std::nextafter(x, kInfinity);
}

double below(double x) {
  return std::nextafter(x, -kInfinity);
}

/// A bound is not below what it bounds, and at most one double above the least such double.
void expect_tight_bound(double bound, const Exact& exact) {
  RC_ASSERT(!std::isnan(bound));
  if (bound == kInfinity) {
    RC_ASSERT(exact >= std::numeric_limits<double>::max() * (1 - Exact(0x1p-52)));
    return;
  }
  RC_ASSERT(Exact(bound) >= exact);
  RC_ASSERT(exact == 0 || Exact(below(below(bound))) < exact);
}

/// A positive double of any size: exponents of all ranges are equally likely.
double draw_positive(int least_exponent, int most_exponent) {
  const auto bits = *rc::gen::inRange<Index>(Index{1} << 52, Index{1} << 53);
  const int exponent = *rc::gen::inRange(least_exponent, most_exponent + 1);
  return std::max(kLeast, std::ldexp(static_cast<double>(bits), exponent - 52));
}

/// Decays of everyday and of extreme size.
Decay draw_decay() {
  const bool everyday = *rc::gen::arbitrary<bool>();
  Decay decay;
  decay.initial = everyday ? draw_positive(-10, 10) : draw_positive(-1074, 1023);
  switch (*rc::gen::inRange(0, 4)) {
    case 0:
      decay.rate = static_cast<double>(*rc::gen::inRange<Index>(1, 1000)) / 1000.0;
      break;
    case 1:
      decay.rate = everyday ? draw_positive(-40, -1) : draw_positive(-1074, -1);
      break;
    case 2:
      decay.rate = 1.0 - draw_positive(-52, -2);
      break;
    default:
      decay.rate = 1.0 - 0x1p-53 * static_cast<double>(*rc::gen::inRange<Index>(1, 9));
  }
  decay.rate = std::min(decay.rate, 1.0 - 0x1p-53);
  return decay;
}

/// Sums of hundreds of terms of a tiny rate would take long without rounding.
Index draw_age(const Decay& decay) {
  return *rc::gen::inRange<Index>(0, decay.rate < 0x1p-60 ? 6 : 25);
}

// ---- T2.1 -------------------------------------------------------------------------------------------------

// log(0.5)/log(0.9) = 6.578..., so k = 6 meets the premise, and the sum is
//   0.9 + 0.81 + 0.729 + 0.6561 + 0.59049 + 0.531441 = 4.217031, not below 0.5.
TEST(TheoremAsPrinted, IsRefutedByItsSmallestWitness) {
  const Decay decay{1.0, 0.1};
  EXPECT_TRUE(printed_premise(decay, 0.5, 6));
  EXPECT_FALSE(printed_premise(decay, 0.5, 7));
  const Finding finding = printed_theorem(decay, 0.5, 6);
  EXPECT_EQ(finding.verdict(), Verdict::fails);
  EXPECT_LE(Exact(finding.measured), brute_sum(decay, 6));
  EXPECT_GT(Exact(above(above(finding.measured))), brute_sum(decay, 6));
  EXPECT_LT(abs(Exact(finding.measured) - Exact("4217031/1000000")), Exact(1e-15));
}

// The premise says A (1-λ)^k >= ε. So each of the k terms is at least ε, and the sum at least k ε.
TEST(TheoremAsPrinted, HasAPremiseThatSaysTheReverse) {
  check_interesting("the premise is that what is left is not below epsilon", 0.3, [] {
    const Decay decay = draw_decay();
    const Index k = draw_age(decay);
    const Exact left = attention(decay, k);
    // Near what is left, where the premise turns, or anywhere.
    double epsilon = left.convert_to<double>() * (0.5 + 0.125 * *rc::gen::inRange(0, 9));
    RC_PRE(epsilon > 0.0 && std::isfinite(epsilon) && Exact(epsilon) != left);
    RC_ASSERT(printed_premise(decay, epsilon, k) == (Exact(epsilon) < left));
    return printed_premise(decay, epsilon, k);
  });
}

TEST(TheoremAsPrinted, FailsWhereverItAppliesToAtLeastOneStep) {
  check_interesting("under the premise the sum is at least k epsilon", 0.5, [] {
    const Decay decay = draw_decay();
    const Index k = 1 + draw_age(decay);
    const double epsilon = attention(decay, k).convert_to<double>() * 0.5;
    RC_PRE(epsilon > 0.0);
    const Finding finding = printed_theorem(decay, epsilon, k);
    RC_ASSERT(!finding.applies() || brute_sum(decay, k) >= k * Exact(epsilon));
    RC_ASSERT(finding.verdict() == (finding.applies() ? Verdict::fails : Verdict::does_not_apply));
    return finding.applies();
  });
}

// With <= in place of <, k = 1 is a way out: A (1-λ) = ε, and nothing else is.
TEST(TheoremAsPrinted, IsTrueForNoStepAtAll) {
  EXPECT_TRUE(printed_theorem({1.0, 0.5}, 0.25, 0).holds());
  EXPECT_EQ(printed_theorem({1.0, 0.5}, 2.0, 0).verdict(), Verdict::does_not_apply);
  // ε = A: log(ε/A) = 0, and 0 <= 0.
  EXPECT_TRUE(printed_premise({1.0, 0.5}, 1.0, 0));
}

// The largest double below the loss of 1/2 is what the loss is rounded down to, and no bound of it.
TEST(TheoremAsPrinted, FailsByLessThanADoubleCanTell) {
  const double epsilon = std::nextafter(0.5, 0.0);
  const Finding finding = printed_theorem({1.0, 0.5}, epsilon, 1);
  EXPECT_EQ(finding.measured, epsilon);
  EXPECT_EQ(finding.verdict(), Verdict::fails);
}

// λ = 2^-400: 1-λ is 1 to 335 bits, and the sum of two terms, 2 - 3λ, is 2; what is reported is less.
TEST(TheoremAsPrinted, NeverReportsMoreThanTheSum) {
  EXPECT_EQ(printed_theorem({1.0, 0x1p-400}, 0.5, 2).measured, below(2.0));
}

// ---- bounds -----------------------------------------------------------------------------------------------

TEST(InformationLoss, BoundsAreTheirFormulasRoundedUp) {
  check_interesting("R1, R2, R3 against sums without rounding", 0.5, [] {
    const Decay decay = draw_decay();
    const Index k = draw_age(decay);
    const Index tokens = *rc::gen::inRange<Index>(1, 5000);
    RC_LOG() << decay << ", k = " << k << ", c = " << tokens << "\n";
    expect_tight_bound(attention_bound(decay, k), attention(decay, k));
    expect_tight_bound(summed_loss_bound(decay, k), brute_sum(decay, k));
    expect_tight_bound(flush_loss_bound(decay, tokens, k), tokens * attention(decay, k));
    // S = Σ_{t>k} c A (1-λ)^t is the number with S = c A (1-λ)^{k+1} + (1-λ) S.
    const Exact future = tokens * attention(decay, k + 1) / decay.rate;
    RC_ASSERT(future == tokens * attention(decay, k + 1) + (1 - Exact(decay.rate)) * future);
    expect_tight_bound(future_loss_bound(decay, tokens, k), future);
    return k > 1;
  });
}

// Ages and rates at which no sum without rounding is affordable: by repeated squaring with 1,000 digits,
// 1-λ included, for which exp and log of the library are not used.
TEST(InformationLoss, BoundsHoldAtAnyAge) {
  using Wider = boost::multiprecision::number<boost::multiprecision::cpp_bin_float<1000>>;
  check_interesting("ages up to the largest index", 0.15, [] {
    const Decay decay = draw_decay();
    // Some ages at which attention has fallen by up to e^40, some of any size.
    const double share = 40.0 * *rc::gen::inRange(0, 101) / 100.0;
    const auto k = *rc::gen::arbitrary<bool>() && decay.rate > 0x1p-56
                       ? static_cast<Index>(share / decay.rate)
                       : static_cast<Index>(draw_positive(0, 61));
    const Wider kept = 1 - Wider(decay.rate);
    Wider left = decay.initial;
    Wider square = kept;
    for (Index bits = k; bits > 0; bits >>= 1) {
      left *= bits % 2 == 1 ? square : Wider(1);
      square *= square;
    }
    const Wider error = 1e-250;
    const double bound = attention_bound(decay, k);
    RC_ASSERT(Wider(bound) >= left * (1 - error));
    RC_ASSERT(Wider(below(below(bound))) < left * (1 + error));
    const double future = future_loss_bound(decay, 1, k);
    RC_ASSERT(Wider(future) >= left * kept / decay.rate * (1 - error));
    const double sum = summed_loss_bound(decay, k);
    // (A - left) cancels where λ k is tiny; 1,000 digits leave 600 of them.
    const Wider exact = (decay.initial - left) * kept / decay.rate;
    RC_ASSERT(Wider(sum) >= exact * (1 - error));
    RC_ASSERT(sum == kInfinity || Wider(below(below(sum))) < exact * (1 + error));
    return bound > kLeast && k > 1000;
  });
}

// At the edges of doubles: no bound is 0 though attention underflows, none is finite though it overflows.
TEST(InformationLoss, BoundsAreSafeAtTheEdgesOfDoubles) {
  const double most = std::numeric_limits<double>::max();
  EXPECT_EQ(attention_bound({most, 1.0 - 0x1p-53}, kMost), kLeast);
  EXPECT_EQ(flush_loss_bound({kLeast, 1.0 - 0x1p-53}, kMost, 1),
            1024 * kLeast);  // 2^63 2^-53 kLeast, less 2^-53
  EXPECT_EQ(flush_loss_bound({most, 0.5}, 2, 0), kInfinity);
  EXPECT_EQ(summed_loss_bound({1.0, kLeast}, kMost), 0x1p63);  // 2^63 - 1 terms of all but 1
  EXPECT_EQ(future_loss_bound({1.0, kLeast}, 1, 0), kInfinity);
  EXPECT_EQ(summed_loss_bound({kLeast, kLeast}, 0), 0.0);
}

// ---- thresholds -------------------------------------------------------------------------------------------

/// What the bounds' margin may cost: a loss within 2^-199 of ε counts as more.
const Exact kTooCloseToCall = 1 + 1 / power(2, 199);

/// A number near a loss, on one side of it or the other.
double draw_near(const Exact& loss) {
  const auto share = *rc::gen::element(0.25, 0.999999, 1.000001, 1.5, 4.0);
  return loss.convert_to<double>() * share;
}

TEST(InformationLoss, TheLargestAgeIsTheLastThatLosesNoMoreThanEpsilon) {
  check_interesting("R1's threshold", 0.3, [] {
    const Decay decay = draw_decay();
    const double epsilon = draw_near(brute_sum(decay, 1 + draw_age(decay)));
    RC_PRE(epsilon > 0.0 && std::isfinite(epsilon));
    const std::optional<Index> age = largest_age(decay, epsilon);
    const Exact argument = 1 - Exact(epsilon) * decay.rate / (decay.initial * (1 - Exact(decay.rate)));
    if (!age) {
      // Any k will do, or any Index: then each of them loses less than it could if nothing decayed.
      RC_ASSERT(argument <= 0 ||
                Exact(epsilon) >= kMost * Exact(decay.initial) * (1 - Exact(decay.rate)) / 2);
      return false;
    }
    RC_ASSERT(argument > 0);
    if (*age > 60) {
      return false;  // too far to add up without rounding
    }
    RC_ASSERT(brute_sum(decay, *age) <= Exact(epsilon));
    RC_ASSERT(brute_sum(decay, *age + 1) * kTooCloseToCall > Exact(epsilon));
    if (decay.rate > 0x1p-100) {
      const Wide printed = log(Wide(argument)) / log(Wide(1 - Exact(decay.rate)));
      RC_ASSERT(floor(printed).convert_to<Index>() == *age);
    }
    return *age > 0;
  });
}

TEST(InformationLoss, TheLeastWaitIsTheFirstAgeThatLosesNoMoreThanEpsilon) {
  check_interesting("R2's threshold", 0.3, [] {
    const Decay decay = draw_decay();
    const Index tokens = *rc::gen::inRange<Index>(1, 5000);
    const double epsilon = draw_near(tokens * attention(decay, draw_age(decay)));
    RC_PRE(epsilon > 0.0 && std::isfinite(epsilon));
    const std::optional<Index> wait = least_wait(decay, tokens, epsilon);
    if (!wait) {
      RC_ASSERT(Exact(decay.rate) * kMost < 10'000);  // so slow a decay that no Index is long enough
      return false;
    }
    if (*wait > 60) {
      return false;
    }
    RC_ASSERT(tokens * attention(decay, *wait) <= Exact(epsilon));
    RC_ASSERT(*wait == 0 || tokens * attention(decay, *wait - 1) * kTooCloseToCall > Exact(epsilon));
    if (*wait > 0 && decay.rate > 0x1p-100) {
      const Wide printed = log(Wide(epsilon) / (Wide(tokens) * decay.initial)) / log(1 - Wide(decay.rate));
      RC_ASSERT(ceil(printed).convert_to<Index>() == *wait);
    }
    return *wait > 0;
  });
}

TEST(InformationLoss, TheLargestBinIsTheLastWhoseTokensMayAllGo) {
  check_interesting("R3's threshold", 0.3, [] {
    const Decay decay = draw_decay();
    const Index k = draw_age(decay);
    const Exact one = attention(decay, k + 1) / decay.rate;
    const double epsilon = draw_near(one * *rc::gen::inRange<Index>(1, 5000));
    RC_PRE(epsilon > 0.0 && std::isfinite(epsilon));
    const Index bin = largest_bin(decay, epsilon, k);
    RC_ASSERT(bin * one <= Exact(epsilon));
    RC_ASSERT(bin == kMost || (bin + 1) * one * kTooCloseToCall > Exact(epsilon));
    return bin > 0 && bin < kMost;
  });
}

// λ = 10^-9: k terms add up to about k - λ k²/2, which is 99,999.9995 for k = 100,005 and one more for the
// next. Attention halves after ln 2 / -ln(1-λ) = 693,147,180.2 steps. λ = 1/2: 1/2 + 1/4 + 1/8 = 0.875.
TEST(InformationLoss, ThresholdsByHand) {
  EXPECT_EQ(largest_age({1.0, 1e-9}, 100'000.5), 100'005);
  EXPECT_EQ(least_wait({1.0, 1e-9}, 1, 0.5), 693'147'181);
  EXPECT_EQ(largest_age({1.0, 0.5}, 0.9), 3);
  EXPECT_EQ(largest_age({1.0, 0.5}, 0.4), 0);
  EXPECT_EQ(largest_age({1.0, 0.5}, 1.5), std::nullopt);  // all of it adds up to 1
  EXPECT_EQ(least_wait({1.0, 0.5}, 8, 1.5), 3);
  EXPECT_EQ(least_wait({1.0, 0.5}, 8, 8.0), 0);
  EXPECT_EQ(least_wait({1.0, 1e-20}, 1, 0.5), std::nullopt);
  EXPECT_EQ(largest_bin({1.0, 0.5}, 0.9, 2), 3);  // a token flushed at age 2 still has 1/4 to lose
  EXPECT_EQ(largest_bin({1.0, 0.5}, 0.2, 2), 0);
  EXPECT_EQ(largest_bin({1.0, 0.5}, 1e300, 2), kMost);
}

// Where loss and ε are equal, the margin of the bounds decides: one short, never one too far.
TEST(InformationLoss, ThresholdsAreOneShortRatherThanTooFarWhereLossIsEpsilon) {
  EXPECT_THAT(*largest_age({1.0, 0.5}, 0.875), ::testing::AnyOf(2, 3));
  EXPECT_THAT(*least_wait({1.0, 0.5}, 8, 1.0), ::testing::AnyOf(3, 4));
  EXPECT_THAT(largest_bin({1.0, 0.5}, 0.75, 2), ::testing::AnyOf(2, 3));
}

// The repaired theorem goes the other way than T2.1: the longer the bin waits, the less its flush loses.
TEST(InformationLoss, WaitingHelps) {
  const Decay decay{1.0, 0.1};
  for (Index k = 0; k < 100; ++k) {
    EXPECT_LT(flush_loss_bound(decay, 4, k + 1), flush_loss_bound(decay, 4, k));
    EXPECT_LT(future_loss_bound(decay, 4, k + 1), future_loss_bound(decay, 4, k));
    EXPECT_GT(summed_loss_bound(decay, k + 1), summed_loss_bound(decay, k));
  }
}

// ---- on observed attention --------------------------------------------------------------------------------

/// Attention at ages first .. first + horizon - 1 of tokens that decay exactly by halves.
std::vector<double> halves(double initial, Index first, Index horizon) {
  std::vector<double> attention;
  for (Index age = first; age < first + horizon; ++age) {
    attention.push_back(std::ldexp(initial, static_cast<int>(-age)));
  }
  return attention;
}

TEST(InformationLoss, IsAttainedByExactDecay) {
  const Decay decay{3.0, 0.5};
  const Finding summed = summed_loss(decay, halves(3.0, 1, 20));
  EXPECT_EQ(summed.measured, 3.0 - 3.0 * 0x1p-20);
  EXPECT_TRUE(summed.holds());
  EXPECT_LE(summed.bound, above(above(summed.measured)));

  const std::vector<double> together(7, 3.0 / 16.0);
  const Finding flush = flush_loss(decay, together, 4);
  EXPECT_EQ(flush.measured, 21.0 / 16.0);
  EXPECT_TRUE(flush.holds());
  EXPECT_LE(flush.bound, above(above(flush.measured)));
  EXPECT_EQ(flush.cases, 7);

  // From age 5 on: 2 tokens, 3/32 + 3/64 + ... falls short of its limit 3/16 by the last term.
  for (const Index horizon : {1, 8, 40}) {
    std::vector<double> future = halves(3.0, 5, horizon);
    const std::vector<double> second = future;
    future.insert(future.end(), second.begin(), second.end());
    const Finding finding = future_loss(decay, View<const double, 2>(future.data(), {2, horizon}), 4);
    EXPECT_TRUE(finding.holds());
    EXPECT_EQ(finding.measured, 2.0 * (3.0 / 16.0) * (1.0 - std::ldexp(1.0, static_cast<int>(-horizon))));
    EXPECT_LE(finding.bound, above(above(2.0 * 3.0 / 16.0)));
  }
}

TEST(InformationLoss, NeverExceedsItsBoundUnderTheDecay) {
  check_interesting("attention anywhere below a decay", 0.9, [] {
    const Decay decay = draw_decay();
    const Index k = draw_age(decay);
    const Index tokens = *rc::gen::inRange<Index>(1, 6);
    const Index horizon = *rc::gen::inRange<Index>(1, 20);
    testing::Stream stream(*rc::gen::arbitrary<std::uint64_t>());
    const auto draw = [&](Index age) {
      // A third of them touch the decay: the bound may round up, the largest double within it does not.
      const double touching = below(attention_bound(decay, age));
      const double most = std::isfinite(touching) ? std::max(0.0, touching) : 1.0;
      return stream.below(3) == 0 ? most : most * static_cast<double>(stream.unit());
    };
    std::vector<double> ages;
    for (Index age = 1; age <= k; ++age) {
      ages.push_back(draw(age));
    }
    std::vector<double> flushed;
    std::vector<double> future;
    for (Index token = 0; token < tokens; ++token) {
      flushed.push_back(draw(k));
      for (Index step = 0; step < horizon; ++step) {
        future.push_back(draw(k + 1 + step));
      }
    }
    RC_ASSERT(summed_loss(decay, ages).holds());
    RC_ASSERT(flush_loss(decay, flushed, k).holds());
    const Finding all = future_loss(decay, View<const double, 2>(future.data(), {tokens, horizon}), k);
    RC_ASSERT(all.holds());
    RC_ASSERT(all.cases == tokens * horizon);
    return all.measured > 0.0;
  });
}

// Without the decay no bound holds: attention of 1 that does not fall. The findings say what is not met.
TEST(InformationLoss, NeedsTheDecay) {
  const Decay decay{1.0, 0.5};
  const std::vector<double> constant(4, 1.0);
  const Finding summed = summed_loss(decay, constant);
  EXPECT_EQ(summed.verdict(), Verdict::does_not_apply);
  EXPECT_EQ(summed.unmet, "attention at age 1 exceeds the decay's A (1-λ)^t");
  EXPECT_LT(summed.slack(), -summed.rounding);
  const Finding flush = flush_loss(decay, constant, 1);
  EXPECT_EQ(flush.verdict(), Verdict::does_not_apply);
  EXPECT_LT(flush.slack(), -flush.rounding);
  const Finding future = future_loss(decay, View<const double, 2>(constant.data(), {1, 4}), 0);
  EXPECT_EQ(future.verdict(), Verdict::does_not_apply);
  EXPECT_LT(future.slack(), -future.rounding);
}

TEST(InformationLoss, TheDecayMayBeMetAtTheAgeItIsOf) {
  const Decay decay{1.0, 0.5};
  // Exactly A at age 0.
  EXPECT_TRUE(flush_loss(decay, std::vector<double>{1.0}, 0).holds());
  // The first row after the moment is of age 1 and may pay 1/2; at age 0 it might pay 3/4.
  const std::vector<double> first{0.75};
  EXPECT_EQ(future_loss(decay, View<const double, 2>(first.data(), {1, 1}), 0).verdict(),
            Verdict::does_not_apply);
}

// One token's loss does not stand for c tokens', as T2.1 lets it: 5 tokens at age 1 lose 2.5, not 0.5.
TEST(InformationLoss, OfSeveralTokensIsNotThatOfOne) {
  const Decay decay{1.0, 0.5};
  EXPECT_GT(flush_loss(decay, std::vector<double>(5, 0.5), 1).measured, flush_loss_bound(decay, 1, 1));
}

TEST(InformationLoss, RefusesWhatIsNoDecayNoCountAndNoEpsilon) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const Decay decay : {Decay{0.0, 0.5}, Decay{-1.0, 0.5}, Decay{kInfinity, 0.5}, Decay{nan, 0.5},
                            Decay{1.0, 0.0}, Decay{1.0, 1.0}, Decay{1.0, -0.1}, Decay{1.0, nan}}) {
    EXPECT_THROW(attention_bound(decay, 1), ContractViolation) << decay;
    EXPECT_THROW(summed_loss_bound(decay, 1), ContractViolation) << decay;
    EXPECT_THROW(flush_loss_bound(decay, 1, 1), ContractViolation) << decay;
    EXPECT_THROW(future_loss_bound(decay, 1, 1), ContractViolation) << decay;
    EXPECT_THROW(printed_premise(decay, 0.5, 1), ContractViolation) << decay;
  }
  const Decay decay{1.0, 0.5};
  for (const double epsilon : {0.0, -1.0, kInfinity, nan}) {
    EXPECT_THROW(printed_premise(decay, epsilon, 1), ContractViolation);
    EXPECT_THROW(largest_age(decay, epsilon), ContractViolation);
    EXPECT_THROW(least_wait(decay, 1, epsilon), ContractViolation);
    EXPECT_THROW(largest_bin(decay, epsilon, 1), ContractViolation);
  }
  EXPECT_THROW(summed_loss_bound(decay, -1), ContractViolation);
  EXPECT_THROW(flush_loss_bound(decay, 0, 1), ContractViolation);
  EXPECT_THROW(future_loss_bound(decay, 1, -1), ContractViolation);
  EXPECT_THROW(summed_loss(decay, std::vector<double>{-0.5}), ContractViolation);
  EXPECT_THROW(summed_loss(decay, std::vector<double>{nan}), ContractViolation);
}

}  // namespace
}  // namespace hae::analysis
