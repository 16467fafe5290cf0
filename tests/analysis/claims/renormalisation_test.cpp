#include "analysis/claims/renormalisation.hpp"

#include <gtest/gtest.h>
// RapidCheck needs GoogleTest first.
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "testing/generators.hpp"
#include "testing/memory_trace.hpp"
#include "testing/stream.hpp"
#include "tests/analysis/claims/exact.hpp"
#include "tests/support/interesting.hpp"
#include "tests/support/policy_specs.hpp"

// The identities of a renormalised row: without rounding on every small row, then on rows of any kind.

namespace hae::analysis {
namespace {

using testing::check_interesting;
using testing::Exact;
using testing::MemoryTrace;

/// A row that owns its numbers.
struct OwnRow {
  std::vector<float> weights;
  std::vector<float> keep;
  std::vector<float> values;  ///< [keys, head_dim]
  Index head_dim = 1;

  [[nodiscard]] AttentionRow row() const {
    const auto keys = static_cast<Index>(weights.size());
    return {weights, keep, View<const float, 2>(values.data(), {keys, head_dim})};
  }
};

/// The same row without rounding.
struct ExactRow {
  Exact all = 0;
  Exact resident = 0;
  Exact missed = 0;             ///< m
  Exact variation = 0;          ///< ½ Σ |a - a'|
  std::vector<Exact> moved;     ///< o - o'
  std::vector<Exact> identity;  ///< m (v̄_E - v̄_S)
  Exact squared_diameter = 0;

  explicit ExactRow(const OwnRow& row) {
    const std::size_t keys = row.weights.size();
    for (std::size_t j = 0; j < keys; ++j) {
      all += row.weights[j];
      resident += row.keep[j] == 1.0f ? row.weights[j] : 0.0f;
    }
    if (resident == 0) {
      return;
    }
    missed = 1 - resident / all;
    for (std::size_t j = 0; j < keys; ++j) {
      variation += abs(row.weights[j] / all - kept(row, j)) / 2;
    }
    for (Index d = 0; d < row.head_dim; ++d) {
      Exact full = 0;
      Exact rest = 0;
      Exact evicted = 0;
      for (std::size_t j = 0; j < keys; ++j) {
        const Exact v = row.values[j * at(row.head_dim) + at(d)];
        full += row.weights[j] / all * v;
        rest += kept(row, j) * v;
        evicted += row.keep[j] == 0.0f && missed > 0 ? row.weights[j] / (all - resident) * v : Exact(0);
      }
      moved.push_back(full - rest);
      identity.push_back(missed * (evicted - rest));
    }
    for (std::size_t i = 0; i < keys; ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        squared_diameter = std::max(squared_diameter, squared_distance(row, i, j));
      }
    }
  }

  [[nodiscard]] Exact kept(const OwnRow& row, std::size_t j) const {
    return row.keep[j] == 1.0f ? row.weights[j] / resident : Exact(0);
  }

  static Exact squared_distance(const OwnRow& row, std::size_t i, std::size_t j) {
    Exact squares = 0;
    for (std::size_t d = 0; d < at(row.head_dim); ++d) {
      const Exact x = Exact(row.values[i * at(row.head_dim) + d]) - row.values[j * at(row.head_dim) + d];
      squares += x * x;
    }
    return squares;
  }

  [[nodiscard]] Exact squared_move() const {
    Exact squares = 0;
    for (const Exact& x : moved) {
      squares += x * x;
    }
    return squares;
  }
};

double diameter_of(const OwnRow& row) {
  return diameter_bound(row.row().values);
}

bool all_hold(const OwnRow& row) {
  const AttentionRow r = row.row();
  return total_variation(r).holds() && kl_divergence(r).holds() &&
         output_identity(r).verdict() != Verdict::fails &&
         output_within_diameter(r, diameter_of(row)).holds() &&
         output_without_one_token(r).verdict() != Verdict::fails;
}

/// Calls check(row) for every row of `keys` of these weights and every choice of evicted tokens.
template <typename Check>
void for_each_small_row(Index keys, const std::vector<float>& weights, const Check& check) {
  const std::vector<float> values{3.0f, -1.0f, 0.5f, 2.0f, -4.0f, 8.0f};
  const auto kinds = 2 * static_cast<Index>(weights.size());  // a weight, evicted or not
  Index rows = 1;
  for (Index j = 0; j < keys; ++j) {
    rows *= kinds;
  }
  for (Index code = 0; code < rows; ++code) {
    OwnRow row;
    Index rest = code;
    for (Index j = 0; j < keys; ++j) {
      row.weights.push_back(weights[at(rest % kinds / 2)]);
      row.keep.push_back(rest % 2 == 0 ? 1.0f : 0.0f);
      rest /= kinds;
    }
    row.values.assign(values.begin(), values.begin() + keys);
    check(row);
  }
}

// Every row of up to 6 keys. Without rounding the identities are equations; the findings hold, and what they
// measure is within their rounding of the exact numbers, which `holds` alone would not show.
TEST(Renormalisation, IsExactOnEverySmallRow) {
  Index applicable = 0;
  for (Index keys = 1; keys <= 6; ++keys) {
    const std::vector<float> weights =
        keys <= 4 ? std::vector{0.0f, 1.0f, 2.0f, 4.0f} : std::vector{1.0f, 3.0f};
    for_each_small_row(keys, weights, [&](const OwnRow& row) {
      const ExactRow exact(row);
      if (exact.resident == 0) {
        EXPECT_FALSE(total_variation(row.row()).applies());
        return;
      }
      ++applicable;
      EXPECT_EQ(exact.variation, exact.missed);
      EXPECT_EQ(exact.moved, exact.identity);
      EXPECT_LE(exact.squared_move(), exact.missed * exact.missed * exact.squared_diameter);
      const Finding variation = total_variation(row.row());
      EXPECT_LE(abs(Exact(variation.measured) - exact.variation), Exact(variation.rounding));
      EXPECT_LE(abs(Exact(variation.bound) - exact.missed), Exact(variation.rounding));
      const Finding output = output_within_diameter(row.row(), diameter_of(row));
      EXPECT_LE(abs(Exact(output.measured) - abs(exact.moved[0])), Exact(output.rounding));
      ASSERT_TRUE(all_hold(row));
    });
  }
  EXPECT_GT(applicable, 8'000);
}

/// A row of up to 300 keys: spread, tied, one-hot, with zeros or subnormal, with an outlier in weights and
/// values.
OwnRow draw_row() {
  testing::Stream stream(*rc::gen::arbitrary<std::uint64_t>());
  const Index keys = *rc::gen::inRange<Index>(1, 300);
  const int kind = *rc::gen::inRange(0, 5);
  const Index evicted_in_ten = *rc::gen::inRange<Index>(0, 11);
  OwnRow row;
  row.head_dim = *rc::gen::inRange<Index>(1, 9);
  for (Index j = 0; j < keys; ++j) {
    const float u = stream.unit();
    const std::array<float, 5> weight{u * u, 1.0f, stream.below(2) == 0 ? 0.0f : u,
                                      static_cast<float>(stream.below(9)) * 0x1p-149f, u * 0x1p-100f};
    row.weights.push_back(weight[static_cast<std::size_t>(kind)]);
    row.keep.push_back(stream.below(10) < evicted_in_ten ? 0.0f : 1.0f);
    for (Index d = 0; d < row.head_dim; ++d) {
      row.values.push_back(stream.signed_unit());
    }
  }
  row.weights[at(stream.below(keys))] += kind == 3 ? 0x1p-140f : 4.0f;
  row.values[at(stream.below(keys * row.head_dim))] *= 1000.0f;
  return row;
}

TEST(Renormalisation, HoldsOnRowsOfAnyKind) {
  check_interesting("rows of any kind", 0.6, [] {
    const OwnRow row = draw_row();
    const Finding variation = total_variation(row.row());
    if (!variation.applies()) {
      RC_ASSERT(ExactRow(row).resident == 0);
      return false;
    }
    RC_ASSERT(all_hold(row));
    // A rounding that swallows what is measured would hide any error.
    RC_ASSERT(variation.rounding < 1e-5);
    RC_ASSERT(kl_divergence(row.row()).rounding < 1e-5);
    return variation.measured > 1e-3;
  });
}

// One token: |o - o'| = p/(1-p) |o - v|, for every p up to all but 2^-24 of the mass.
TEST(Renormalisation, OfOneTokenIsItsPull) {
  check_interesting("one token is evicted", 0.5, [] {
    OwnRow row = draw_row();
    std::ranges::fill(row.keep, 1.0f);
    const Index token = *rc::gen::inRange<Index>(0, static_cast<Index>(row.keep.size()));
    row.keep[at(token)] = 0.0f;
    row.weights[at(token)] *= *rc::gen::element(1.0f, 1.0f, 1024.0f);
    const Finding finding = output_without_one_token(row.row());
    RC_ASSERT(finding.verdict() != Verdict::fails);
    return finding.holds() && finding.bound > 1e-6;
  });
}

// What is evicted all lies at one end of the diameter and the rest at the other: o moves by m times all of
// it. Weights 1 and 3: m = 1/4; values 0 and 8: from o = 6 to o' = 8.
TEST(Renormalisation, AttainsTheDiameter) {
  const OwnRow row{{1.0f, 2.0f, 1.0f}, {0.0f, 1.0f, 1.0f}, {0.0f, 8.0f, 8.0f}, 1};
  const Finding finding = output_within_diameter(row.row(), 8.0);
  EXPECT_EQ(finding.measured, 2.0);
  EXPECT_EQ(finding.bound, 2.0);
  EXPECT_TRUE(finding.holds());
  // A smaller number than the diameter does not bound.
  EXPECT_EQ(output_within_diameter(row.row(), 7.0).verdict(), Verdict::fails);
}

// Weights 1, 1, 2, the last is evicted: m = 1/2 and KL = ln 2; a' = (1/2, 1/2).
TEST(Renormalisation, ByHand) {
  const OwnRow row{{1.0f, 1.0f, 2.0f}, {1.0f, 1.0f, 0.0f}, {2.0f, 4.0f, 7.0f}, 1};
  EXPECT_EQ(total_variation(row.row()).measured, 0.5);
  EXPECT_EQ(total_variation(row.row()).bound, 0.5);
  EXPECT_EQ(kl_divergence(row.row()).measured, std::log(2.0));
  EXPECT_EQ(kl_divergence(row.row()).bound, -std::log(0.5));
  // o = 2/4 + 4/4 + 14/4 = 5, o' = 3, v̄_E = 7; m (7 - 3) = 2; p/(1-p) |o - v| = 1 · |5 - 7|.
  EXPECT_EQ(output_identity(row.row()).measured, 2.0);
  EXPECT_EQ(output_identity(row.row()).bound, 2.0);
  EXPECT_EQ(output_without_one_token(row.row()).bound, 2.0);
}

// All mass is evicted: there is no a', and 1 - m = 0 has no logarithm.
TEST(Renormalisation, NeedsResidentMass) {
  const OwnRow gone{{0.0f, 1.0f}, {1.0f, 0.0f}, {1.0f, 2.0f}, 1};
  const OwnRow masked{{0.0f, 0.0f}, {1.0f, 0.0f}, {1.0f, 2.0f}, 1};
  for (const auto& [row, why] :
       {std::pair(gone, "no mass is left to the residents"), std::pair(masked, "the row has no mass")}) {
    for (const Finding& finding :
         {total_variation(row.row()), kl_divergence(row.row()), output_identity(row.row()),
          output_within_diameter(row.row(), 1.0), output_without_one_token(row.row())}) {
      EXPECT_EQ(finding.unmet, why);
      EXPECT_EQ(finding.verdict(), Verdict::does_not_apply);
    }
  }
}

// Two tokens do not move the output as either alone would. Weights 1, 1, 2, the last two evicted, values 0,
// 4, -2: o = o' = 0, so nothing moves, while p/(1-p) |o - v| is 1/3 · 4 and 1 · 2.
TEST(Renormalisation, OfTwoTokensIsNotThePullOfOne) {
  const OwnRow row{{1.0f, 1.0f, 2.0f}, {1.0f, 0.0f, 0.0f}, {0.0f, 4.0f, -2.0f}, 1};
  EXPECT_EQ(output_identity(row.row()).measured, 0.0);
  EXPECT_EQ(output_without_one_token(row.row()).unmet, "2 tokens are evicted, not one");
}

// Nothing evicted, or only tokens without weight: nothing moves, and v̄_E does not exist.
TEST(Renormalisation, TheIdentityNeedsMissedMass) {
  const OwnRow row{{1.0f, 0.0f}, {1.0f, 0.0f}, {1.0f, 2.0f}, 1};
  EXPECT_EQ(output_identity(row.row()).unmet, "no mass is missed");
  EXPECT_EQ(total_variation(row.row()).measured, 0.0);
  EXPECT_TRUE(output_within_diameter(row.row(), 0.0).holds());
}

TEST(Renormalisation, RefusesWhatIsNoRow) {
  const OwnRow negative{{-1.0f, 2.0f}, {1.0f, 1.0f}, {1.0f, 2.0f}, 1};
  const OwnRow half_kept{{1.0f, 2.0f}, {1.0f, 0.5f}, {1.0f, 2.0f}, 1};
  const OwnRow short_keep{{1.0f, 2.0f}, {1.0f}, {1.0f, 2.0f}, 1};
  for (const OwnRow& row : {negative, half_kept, short_keep}) {
    EXPECT_THROW(total_variation(row.row()), ContractViolation);
  }
}

// 3-4-5 triangle.
TEST(Renormalisation, TheDiameterIsNotBelowTheLargestDistance) {
  const std::vector<float> values{0.0f, 0.0f, 3.0f, 4.0f, 1.0f, 1.0f};
  const double diameter = diameter_bound(View<const float, 2>(values.data(), {3, 2}));
  EXPECT_GE(diameter, 5.0);
  EXPECT_LE(diameter, 5.0 + 1e-14);
  // √3 = 1.7320508075688772935.., and the nearest double is 1.7320508075688771931..
  const std::vector<float> corners{0.0f, 0.0f, 0.0f, 1.0f, 1.0f, 1.0f};
  EXPECT_GT(diameter_bound(View<const float, 2>(corners.data(), {2, 3})), std::sqrt(3.0));
}

/// Calls check(row, layer, head, step) for every decode row of a run.
template <typename Check>
void for_each_decode_row(const MemoryTrace& trace, const RunResult& run, const Check& check) {
  const SequenceInfo& info = trace.info;
  for (Index layer = 0; layer < info.layers; ++layer) {
    for (Index head = 0; head < info.query_heads; ++head) {
      const Index kv_head = head / info.group_heads();
      const auto after = testing::residents(trace, run, layer, kv_head);
      for (Index step = 1; step <= info.steps(); ++step) {
        const Index keys = info.prompt + step;
        OwnRow row;
        row.head_dim = *info.head_dim;
        const float* w = trace.attention[at(layer)].data() + (head * info.tokens + keys - 1) * info.tokens;
        row.weights.assign(w, w + keys);
        row.keep.assign(at(keys), 0.0f);
        for (const Index token : after[at(step - 1)]) {
          row.keep[at(token)] = 1.0f;
        }
        row.keep.back() = 1.0f;
        const float* v = trace.values[at(layer)].data() + kv_head * info.tokens * row.head_dim;
        row.values.assign(v, v + keys * row.head_dim);
        check(row, layer, head, step);
      }
    }
  }
}

// The m of a finding is the metric of a run, bit for bit, and so is its KL: the identities speak of what
// `hae compare` prints.
TEST(Renormalisation, SpeaksOfTheEnginesMetrics) {
  check_interesting("decode rows of generated runs", 0.3, [] {
    const MemoryTrace trace = *testing::attention_traces();
    RunResult run =
        testing::run(trace, *rc::gen::element<std::string>("greedy:budget=3", "random:budget=4,lane=kv_head",
                                                           "hae:dap=none,budget=3,bin=2,lane=kv_head"));
    double largest = 0.0;
    for_each_decode_row(trace, run, [&](const OwnRow& row, Index layer, Index head, Index step) {
      const Finding variation = total_variation(row.row());
      if (!variation.applies()) {
        return;
      }
      RC_ASSERT(variation.bound == run.decode.at(Metric::missed_mass, layer, head, step - 1));
      RC_ASSERT(kl_divergence(row.row()).bound == run.decode.at(Metric::kl, layer, head, step - 1));
      RC_ASSERT(all_hold(row));
      largest = std::max(largest, variation.bound);
    });
    return largest > 0.01;
  });
}

}  // namespace
}  // namespace hae::analysis
