#include <gtest/gtest.h>
// RapidCheck needs GoogleTest first.
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>

#include "testing/generators.hpp"
#include "testing/memory_trace.hpp"
#include "tests/support/interesting.hpp"
#include "tests/support/policy_specs.hpp"

// The identities that the metrics rest on, against plain double arithmetic on the trace and the log alone.

namespace hae {
namespace {

using testing::attention_traces;
using testing::MemoryTrace;
using testing::residents;
using testing::run;

/// A row in double: recorded weights, residents, probabilities with and without eviction.
struct PlainRow {
  std::vector<double> a;
  std::vector<double> kept;  ///< a'
  double total = 0;
  double missed = 0;    ///< share of the mass that is evicted
  double resident = 0;  ///< mass that is left
};

PlainRow plain_row(const MemoryTrace& trace, Index layer, Index head, Index query,
                   const std::vector<Index>& cache) {
  const SequenceInfo& info = trace.info;
  const float* w =
      trace.attention[static_cast<std::size_t>(layer)].data() + (head * info.tokens + query) * info.tokens;
  PlainRow row;
  row.a.resize(static_cast<std::size_t>(query + 1));
  row.kept.resize(row.a.size());
  for (std::size_t j = 0; j < row.a.size(); ++j) {
    row.total += static_cast<double>(w[j]);
    if (std::ranges::find(cache, static_cast<Index>(j)) != cache.end()) {
      row.resident += static_cast<double>(w[j]);
      row.kept[j] = static_cast<double>(w[j]);
    }
  }
  for (std::size_t j = 0; j < row.a.size(); ++j) {
    row.a[j] = static_cast<double>(w[j]) / row.total;
    row.kept[j] = row.resident > 0.0 ? row.kept[j] / row.resident : 0.0;
  }
  row.missed = 1.0 - row.resident / row.total;
  return row;
}

/// Calls check(row, measured metrics by index, layer, head, step) for every decode row that has mass and
/// keeps some.
template <typename Check>
Index for_each_row(const MemoryTrace& trace, RunResult& result, const Check& check) {
  const SequenceInfo& info = trace.info;
  Index evicting_rows = 0;
  for (Index layer = 0; layer < info.layers; ++layer) {
    for (Index head = 0; head < info.query_heads; ++head) {
      const Index lane = result.lanes == LaneKind::layer ? 0 : head / info.group_heads();
      const auto after = residents(trace, result, layer, lane);
      for (Index step = 1; step <= info.steps(); ++step) {
        std::vector<Index> cache = after[static_cast<std::size_t>(step - 1)];
        cache.push_back(info.prompt + step - 1);
        const PlainRow row = plain_row(trace, layer, head, info.prompt + step - 1, cache);
        const double kl = result.decode.at(Metric::kl, layer, head, step - 1);
        if (row.resident == 0.0 || row.total == 0.0) {
          RC_ASSERT(std::isnan(kl));
        } else {
          RC_ASSERT(!std::isnan(kl));
          evicting_rows += row.missed > 1e-6 ? 1 : 0;
          check(row, layer, head, step);
        }
      }
    }
  }
  return evicting_rows;
}

std::string draw_spec() {
  return *rc::gen::element<std::string>("greedy:budget=3,lane=kv_head", "random:budget=2,lane=kv_head",
                                        "random:budget=4", "hae:dap=none,budget=3,bin=2",
                                        "window:sinks=1,recent=2");
}

// float32 sums of n non-negative terms in 32 partial sums and a tree of depth 5: relative error at most
// (n/32 + 5) 2^-24; the tests use the bound for n = 64, twice for a quotient, and a factor of two to spare.
constexpr double kSumError = 2.0 * 2.0 * 7.0 * 0x1p-24;

/// How far the tokens of a row pull its output, in long double, and how far off the engine may be.
struct PlainPulls {
  std::vector<long double> pull;   ///< a_j ‖v_j - o‖₂
  std::vector<long double> bound;  ///< of its error
  long double largest = 0;         ///< of |v|, over the row's keys
};

// The engine's a is off by at most kSumError, relative, or by a subnormal's rounding; so is then a term of o
// by as much of |a v|, o in each dimension by as much of the largest |v|, and ‖v_j - o‖ by √d times that.
// Rounding in double, here and there, is below what kSumError leaves to spare.
PlainPulls plain_pulls(const MemoryTrace& trace, const PlainRow& row, Index layer, Index head) {
  const SequenceInfo& info = trace.info;
  const Index d = *info.head_dim;
  const float* v =
      trace.values[static_cast<std::size_t>(layer)].data() + head / info.group_heads() * info.tokens * d;
  PlainPulls pulls;
  std::vector<long double> output(static_cast<std::size_t>(d), 0.0L);
  for (std::size_t j = 0; j < row.a.size(); ++j) {
    for (Index i = 0; i < d; ++i) {
      const long double value = v[static_cast<Index>(j) * d + i];
      output[static_cast<std::size_t>(i)] += static_cast<long double>(row.a[j]) * value;
      pulls.largest = std::max(pulls.largest, std::abs(value));
    }
  }
  const long double shift = (kSumError + 0x1p-140L) * pulls.largest * std::sqrt(static_cast<long double>(d));
  for (std::size_t j = 0; j < row.a.size(); ++j) {
    long double squares = 0.0L;
    for (Index i = 0; i < d; ++i) {
      const long double x = v[static_cast<Index>(j) * d + i] - output[static_cast<std::size_t>(i)];
      squares += x * x;
    }
    const long double a = row.a[j];
    const long double error = a * kSumError + 0x1p-149L;
    pulls.pull.push_back(a * std::sqrt(squares));
    pulls.bound.push_back(error * std::sqrt(squares) + (a + error) * shift);
  }
  return pulls;
}

TEST(Metrics, MissedPullIsTheSumOfSquaredPullsOfEvictedTokens) {
  testing::check_interesting("missed pull", 0.4, [] {
    const MemoryTrace trace = *attention_traces();
    RunResult result = run(trace, draw_spec());
    return 0 < for_each_row(trace, result, [&](const PlainRow& row, Index layer, Index head, Index step) {
             const PlainPulls pulls = plain_pulls(trace, row, layer, head);
             long double missed = 0.0L;
             long double bound = 0.0L;
             for (std::size_t j = 0; j < row.a.size(); ++j) {
               if (row.kept[j] == 0.0) {  // evicted, or without a pull
                 missed += pulls.pull[j] * pulls.pull[j];
                 bound += (2.0L * pulls.pull[j] + pulls.bound[j]) * pulls.bound[j];
               }
             }
             const double measured = result.decode.at(Metric::missed_pull, layer, head, step - 1);
             RC_ASSERT(std::abs(measured - missed) <= bound);
           });
  });
}

// Without token j alone o' = (o - a_j v_j) / (1 - a_j), so o - o' = a_j (v_j - o) / (1 - a_j).
TEST(Metrics, TheOutputErrorOfOneEvictedTokenIsItsPull) {
  testing::check_interesting("pull of one token", 0.2, [] {
    const MemoryTrace trace = *attention_traces();
    RunResult result = run(trace, draw_spec());
    Index rows = 0;
    for_each_row(trace, result, [&](const PlainRow& row, Index layer, Index head, Index step) {
      const auto is_missed = [&](std::size_t j) { return row.kept[j] == 0.0 && row.a[j] > 0.0; };
      std::vector<std::size_t> missed;
      for (std::size_t j = 0; j < row.a.size(); ++j) {
        if (is_missed(j)) {
          missed.push_back(j);
        }
      }
      if (missed.size() != 1) {
        return;
      }
      ++rows;
      const PlainPulls pulls = plain_pulls(trace, row, layer, head);
      const std::size_t token = missed.front();
      const double left = 1.0 - row.a[token];
      const double error = result.decode.at(Metric::output_error, layer, head, step - 1);
      const double pull = std::sqrt(result.decode.at(Metric::missed_pull, layer, head, step - 1));
      // The error of o - o': that of o, and that of o' = Σ a' v, a' off by as much as a, or by the quotient.
      const long double rounding = 2.0L * kSumError * pulls.largest *
                                   std::sqrt(static_cast<long double>(*trace.info.head_dim)) /
                                   std::max(0.5, left);
      RC_ASSERT(std::abs(error * left - pull) <= rounding * left + pulls.bound[token]);
    });
    return rows > 0;
  });
}

TEST(Metrics, MissedMassIsTheTotalVariationBetweenTheTwoAttentions) {
  testing::check_interesting("total variation", 0.4, [] {
    const MemoryTrace trace = *attention_traces();
    RunResult result = run(trace, draw_spec());
    const Index rows =
        for_each_row(trace, result, [&](const PlainRow& row, Index layer, Index head, Index step) {
          double variation = 0.0;
          for (std::size_t j = 0; j < row.a.size(); ++j) {
            variation += std::abs(row.a[j] - row.kept[j]) / 2.0;
          }
          const double m = result.decode.at(Metric::missed_mass, layer, head, step - 1);
          RC_ASSERT(std::abs(m - variation) <= kSumError);
        });
    return rows > 0;
  });
}

TEST(Metrics, KlIsMinusTheLogarithmOfWhatIsLeft) {
  testing::check_interesting("divergence", 0.4, [] {
    const MemoryTrace trace = *attention_traces();
    RunResult result = run(trace, draw_spec());
    const Index rows =
        for_each_row(trace, result, [&](const PlainRow& row, Index layer, Index head, Index step) {
          double divergence = 0.0;
          for (std::size_t j = 0; j < row.a.size(); ++j) {
            divergence += row.kept[j] > 0.0 ? row.kept[j] * std::log(row.kept[j] / row.a[j]) : 0.0;
          }
          const double kl = result.decode.at(Metric::kl, layer, head, step - 1);
          RC_ASSERT(kl >= 0.0);
          RC_ASSERT(std::abs(kl - divergence) <=
                    2.0 * kSumError);  // d(-ln x) = dx / x, relative errors of both sums
          RC_ASSERT(std::abs(kl + std::log1p(-row.missed)) <= 2.0 * kSumError + 1e-12 / (1.0 - row.missed));
        });
    return rows > 0;
  });
}

TEST(Metrics, OutputErrorIsTheMissedMassTimesTheDistanceOfTheMeans) {
  testing::check_interesting("output error", 0.4, [] {
    const MemoryTrace trace = *attention_traces();
    RunResult result = run(trace, draw_spec());
    const SequenceInfo& info = trace.info;
    const Index d = *info.head_dim;
    const Index rows =
        for_each_row(trace, result, [&](const PlainRow& row, Index layer, Index head, Index step) {
          const float* v = trace.values[static_cast<std::size_t>(layer)].data() +
                           head / info.group_heads() * info.tokens * d;
          double largest = 0.0;  // of |v|, for rounding; and diam(V), over the row's keys
          double diameter = 0.0;
          std::vector<double> difference(static_cast<std::size_t>(d), 0.0);  // Σ (a - a') v = m (v̄_E - v̄_S)
          for (std::size_t j = 0; j < row.a.size(); ++j) {
            for (Index i = 0; i < d; ++i) {
              const double value = static_cast<double>(v[static_cast<Index>(j) * d + i]);
              largest = std::max(largest, std::abs(value));
              difference[static_cast<std::size_t>(i)] += (row.a[j] - row.kept[j]) * value;
            }
            for (std::size_t k = 0; k < j; ++k) {
              double squares = 0.0;
              for (Index i = 0; i < d; ++i) {
                const double x = static_cast<double>(v[static_cast<Index>(j) * d + i]) -
                                 static_cast<double>(v[static_cast<Index>(k) * d + i]);
                squares += x * x;
              }
              diameter = std::max(diameter, std::sqrt(squares));
            }
          }
          double squares = 0.0;
          for (const double x : difference) {
            squares += x * x;
          }
          const double error = result.decode.at(Metric::output_error, layer, head, step - 1);
          const double m = result.decode.at(Metric::missed_mass, layer, head, step - 1);
          const double rounding =
              2.0 * kSumError * largest * std::sqrt(static_cast<double>(d)) / std::max(0.5, 1.0 - m);
          RC_ASSERT(std::abs(error - std::sqrt(squares)) <= rounding);
          RC_ASSERT(error <= m * diameter + rounding);
        });
    return rows > 0;
  });
}

// With n residents (at most the keys that the mask allows) no set of n keys misses less than the mass outside
// the n largest: sorted in double here, by the canonical sums there.
TEST(Metrics, TopNowIsTheMassOutsideTheLargestAndBoundsEveryPolicy) {
  testing::check_interesting("top now", 0.4, [] {
    const MemoryTrace trace = *attention_traces();
    const SequenceInfo& info = trace.info;
    RunResult result = run(trace, draw_spec());
    return 0 < for_each_row(trace, result, [&](const PlainRow& row, Index layer, Index head, Index step) {
             const Index lanes = lane_count(info, result.lanes);
             const Index lane = lanes == 1 ? 0 : head / info.group_heads();
             const Index residents = result.attention_tokens[static_cast<std::size_t>(
                 (layer * lanes + lane) * info.steps() + step - 1)];
             std::vector<double> a = row.a;
             std::ranges::sort(a);
             double outside = 0.0;
             for (std::size_t j = 0; j + static_cast<std::size_t>(residents) < a.size(); ++j) {
               outside += a[j];
             }
             const double top_now = result.top_now[static_cast<std::size_t>(
                 (layer * info.query_heads + head) * info.steps() + step - 1)];
             RC_ASSERT(std::abs(top_now - outside) <= kSumError);
             RC_ASSERT(top_now <= result.decode.at(Metric::missed_mass, layer, head, step - 1) + kSumError);
           });
  });
}

}  // namespace
}  // namespace hae
