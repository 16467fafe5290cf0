#include "sim/arithmetic.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <limits>
#include <regex>
#include <string>
#include <vector>

#include "sim/row_kernels.hpp"

namespace hae {
namespace {

/// Error of x in units in the last place of the correctly rounded result; subnormals have the ulp 2^-149.
double ulps(float x, double exact) {
  const float rounded = static_cast<float>(exact);
  const float next = std::nextafter(std::abs(rounded), std::numeric_limits<float>::infinity());
  const double ulp = static_cast<double>(next) - static_cast<double>(std::abs(rounded));
  return std::abs(static_cast<double>(x) - exact) / ulp;
}

TEST(Exponential, IsExactlyOneAtZero) {
  EXPECT_EQ(arithmetic::exp_nonpositive(0.0f), 1.0f);
  EXPECT_EQ(arithmetic::exp_nonpositive(-0.0f), 1.0f);
}

TEST(Exponential, StaysWithinOneUlp) {
  // Every 31st float32 from -0 down to -104, 36 million of them, against the double of the platform's libm.
  double worst = 0.0;
  const auto last = std::bit_cast<std::uint32_t>(-104.0f);
  for (std::uint32_t bits = 0x80000000U; bits <= last; bits += 31) {
    const float x = std::bit_cast<float>(bits);
    const double error = ulps(arithmetic::exp_nonpositive(x), std::exp(static_cast<double>(x)));
    worst = error <= worst ? worst : error;  // NaN wins
  }
  EXPECT_LE(worst, 1.0);
  RecordProperty("worst_ulps", std::to_string(worst));
  std::printf("worst error: %.4f ulp\n", worst);
}

TEST(Exponential, UnderflowsGradually) {
  EXPECT_EQ(arithmetic::exp_nonpositive(-104.5f), 0.0f);
  EXPECT_EQ(arithmetic::exp_nonpositive(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_EQ(arithmetic::exp_nonpositive(-103.5f),
            0x1p-149f);  // e^-103.5 = 1.12e-45, nearest multiple of 1.4e-45
  EXPECT_GT(arithmetic::exp_nonpositive(-95.0f), 0.0f);
  EXPECT_LT(arithmetic::exp_nonpositive(-95.0f), std::numeric_limits<float>::min());
}

TEST(Exponential, MatchesThePublishedTable) {
  std::ifstream page(HAE_SOURCE_DIR "/docs/arithmetic.md");
  const std::regex row(R"(\| `([0-9a-f]{8})` \|.*\| `([0-9a-f]{8})` \|)");
  const auto number = [](const std::string& bits) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(std::stoul(bits, nullptr, 16)));
  };
  int rows = 0;
  std::smatch match;
  for (std::string line; std::getline(page, line);) {
    if (std::regex_match(line, match, row)) {
      ++rows;
      EXPECT_EQ(arithmetic::exp_nonpositive(number(match[1])), number(match[2])) << line;
      EXPECT_LE(ulps(number(match[2]), std::exp(static_cast<double>(number(match[1])))), 1.0) << line;
    }
  }
  EXPECT_EQ(rows, 22);
}

TEST(Logit, AddsDimensionsInOrderWithOneRoundingEach) {
  // 1 * 2^24 = 16777216; + 1 * 1 rounds to 16777216 (ties to even); + 1 * -2^24 = 0. In double, or in another
  // order, the result would be 1. Times 0.5 is 0.
  const float query[] = {1.0f, 1.0f, 1.0f};
  const float key[] = {0x1p24f, 1.0f, -0x1p24f};
  EXPECT_EQ(arithmetic::logit(query, key, 3, 0.5f), 0.0f);

  // (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24, fused with -1 - 2^-11: exactly 2^-24. An unfused product would have
  // lost it.
  const float q[] = {1.0f, 1.0f + 0x1p-12f};
  const float k[] = {-1.0f - 0x1p-11f, 1.0f + 0x1p-12f};
  EXPECT_EQ(arithmetic::logit(q, k, 2, 1.0f), 0x1p-24f);
}

TEST(Sum, FoldsPartialsByPositionInTheStatedTree) {
  // 2^24 at position 0 and ones at 1 .. 31: partial 0 meets partial 16 first (2^24 + 1 -> 2^24), then sums of
  // 2, 4, 8 and 16 ones, which are even and exact: 2^24 + 2 + 4 + 8 + 16 = 2^24 + 30. Left to right it would
  // be 2^24.
  std::vector<float> w(32, 1.0f);
  w[0] = 0x1p24f;
  EXPECT_EQ(kernels::sum(w.data(), 32), 0x1p24f + 30.0f);
}

TEST(Sum, ALeftOutKeyCountsAsZeroAndDoesNotMoveTheOthers) {
  std::vector<float> w(64);
  std::vector<float> keep(64);
  std::vector<float> zeroed(64);
  for (std::size_t j = 0; j < w.size(); ++j) {
    w[j] = 1.0f / static_cast<float>(j + 3);
    keep[j] = j % 3 == 0 ? 0.0f : 1.0f;
    zeroed[j] = j % 3 == 0 ? 0.0f : w[j];
  }
  EXPECT_EQ(kernels::sum_kept(w.data(), keep.data(), 64), kernels::sum(zeroed.data(), 64));
}

TEST(Kernels, LogitsOfATileEqualLogitsOneByOne) {
  constexpr Index kHeadDim = 7;
  for (const Index keys : {1, 31, 32, 33, 70}) {
    for (const Index rows : {1, 2, 3, 4, 7}) {
      std::vector<float> q(static_cast<std::size_t>(rows * kHeadDim));
      std::vector<float> k(static_cast<std::size_t>(keys * kHeadDim));
      for (std::size_t i = 0; i < q.size(); ++i) {
        q[i] = std::sin(static_cast<float>(i) * 1.7f);
      }
      for (std::size_t i = 0; i < k.size(); ++i) {
        k[i] = std::cos(static_cast<float>(i) * 0.9f);
      }
      const Index stride = kernels::padded(keys);
      std::vector<float> packed(static_cast<std::size_t>(stride * kHeadDim));
      std::vector<float> z(static_cast<std::size_t>(rows * stride));
      kernels::pack_keys(k.data(), keys, kHeadDim, packed.data());
      kernels::logits(q.data(), rows, kHeadDim, packed.data(), keys, kHeadDim, 0.3f, z.data(), stride);
      for (Index r = 0; r < rows; ++r) {
        for (Index j = 0; j < keys; ++j) {
          EXPECT_EQ(z[static_cast<std::size_t>(r * stride + j)],
                    arithmetic::logit(&q[static_cast<std::size_t>(r * kHeadDim)],
                                      &k[static_cast<std::size_t>(j * kHeadDim)], kHeadDim, 0.3f));
        }
      }
    }
  }
}

TEST(Kernels, MaximumSeesEveryNotFiniteNumber) {
  for (const Index n : {1, 5, 32, 40}) {
    for (Index bad = 0; bad < n; ++bad) {
      for (const float value :
           {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
            -std::numeric_limits<float>::infinity()}) {
        std::vector<float> z(static_cast<std::size_t>(n), -3.0f);
        EXPECT_TRUE(kernels::maximum(z.data(), 0, n).finite);
        z[static_cast<std::size_t>(bad)] = value;
        EXPECT_FALSE(kernels::maximum(z.data(), 0, n).finite) << bad << " of " << n;
      }
    }
  }
}

TEST(Kernels, WeightedValuesEqualPlainSums) {
  constexpr Index kTokens = 50;
  constexpr Index kHeadDim = 19;
  std::vector<float> v(kTokens * kHeadDim);
  std::vector<double> c(3 * 20);
  std::vector<Index> tokens;
  for (std::size_t i = 0; i < v.size(); ++i) {
    v[i] = std::sin(static_cast<float>(i));
  }
  for (std::size_t i = 0; i < c.size(); ++i) {
    c[i] = static_cast<double>(std::cos(static_cast<float>(i)));
  }
  for (Index t = 0; t < 20; ++t) {
    tokens.push_back(2 * t + 5);
  }
  std::vector<double> out(3 * kHeadDim);
  kernels::weighted_values(c.data(), 3, tokens, v.data(), kHeadDim, out.data());
  for (std::size_t r = 0; r < 3; ++r) {
    for (std::size_t i = 0; i < kHeadDim; ++i) {
      double expected = 0.0;
      for (std::size_t t = 0; t < tokens.size(); ++t) {
        expected +=
            c[r * 20 + t] * static_cast<double>(v[static_cast<std::size_t>(tokens[t]) * kHeadDim + i]);
      }
      EXPECT_EQ(out[r * kHeadDim + i], expected);
    }
  }
}

TEST(Kernels, SquaredPullsAddDimensionsInTheStatedOrder) {
  constexpr Index kRows = 3;
  constexpr Index kTokens = 37;
  constexpr Index kStride = 40;
  for (const Index head_dim : {1, 7, 8, 9, 64, 130}) {
    std::vector<float> v(static_cast<std::size_t>(kTokens * head_dim));
    std::vector<double> o(static_cast<std::size_t>(kRows * head_dim));
    std::vector<double> a(kRows * kTokens);
    std::ranges::generate(v, [i = 0]() mutable { return std::sin(static_cast<float>(i++)); });
    std::ranges::generate(o, [i = 0]() mutable { return std::cos(static_cast<double>(i++)); });
    std::ranges::generate(a,
                          [i = 0]() mutable { return static_cast<double>(1.0f / static_cast<float>(++i)); });
    std::vector<double> out(kRows * kStride);
    kernels::squared_pulls(a.data(), kRows, kTokens, v.data(), o.data(), head_dim, out.data(), kStride);
    for (Index r = 0; r < kRows; ++r) {
      for (Index t = 0; t < kTokens; ++t) {
        double sums[8] = {};
        for (Index d = 0; d < head_dim; ++d) {
          const double difference = static_cast<double>(v[static_cast<std::size_t>(t * head_dim + d)]) -
                                    o[static_cast<std::size_t>(r * head_dim + d)];
          sums[d % 8] = std::fma(difference, difference, sums[d % 8]);
        }
        for (const Index half : {4, 2, 1}) {
          for (Index p = 0; p < half; ++p) {
            sums[p] += sums[p + half];
          }
        }
        const double probability = a[static_cast<std::size_t>(r * kTokens + t)];
        EXPECT_EQ(out[static_cast<std::size_t>(r * kStride + t)], probability * probability * sums[0])
            << head_dim;
      }
    }
  }
}

TEST(Kernels, ListedNumbersAreAddedFromTheFirstToTheLast) {
  // 2^53 + 1 is a tie that goes to the even 2^53, and so again; from the last, 1 + 1 + 2^53 is 2^53 + 2.
  // Each of six rows holds it r times over.
  constexpr Index kStride = 7;
  std::vector<double> x(6 * kStride, 100.0);
  for (std::size_t r = 0; r < 6; ++r) {
    x[r * kStride + 1] = static_cast<double>(r) * 0x1p53;
    x[r * kStride + 2] = x[r * kStride + 5] = static_cast<double>(r);
  }
  std::vector<double> sums(6);
  kernels::sum_listed(x.data(), 2, kStride, std::vector<Index>{1, 2, 5}, sums.data());
  EXPECT_EQ(sums[1], 0x1p53);
  kernels::sum_listed(x.data(), 6, kStride, std::vector<Index>{2, 5}, sums.data());
  for (std::size_t r = 0; r < 6; ++r) {
    EXPECT_EQ(sums[r], 2.0 * static_cast<double>(r));
  }
}

}  // namespace
}  // namespace hae
