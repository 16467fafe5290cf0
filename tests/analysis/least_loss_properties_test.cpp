#include <gtest/gtest.h>
// RapidCheck needs GoogleTest first.
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <numeric>
#include <ostream>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "analysis/least_loss.hpp"
#include "testing/memory_trace.hpp"
#include "tests/support/interesting.hpp"

// The loss against every other way to evict (small lanes) and against the Hungarian algorithm (larger ones).
// Masses are multiples of 2^-20 where totals are compared exactly: then every sum is exact, and 2^-40 is fine
// enough.

namespace hae::analysis {
namespace {

struct Lane {
  Index prompt = 1;
  std::vector<Index> residents;  ///< [steps]
  std::vector<double> mass;      ///< [steps, tokens]

  [[nodiscard]] Index steps() const { return static_cast<Index>(residents.size()); }
  [[nodiscard]] Index tokens() const { return prompt + steps(); }
  [[nodiscard]] double& at(Index row, Index token) {
    return mass[static_cast<std::size_t>(row * tokens() + token)];
  }
  [[nodiscard]] double at(Index row, Index token) const {
    return mass[static_cast<std::size_t>(row * tokens() + token)];
  }

  /// Tokens that leave after each step 0..steps - 1.
  [[nodiscard]] std::vector<Index> due() const {
    std::vector<Index> counts;
    Index before = prompt;
    for (const Index count : residents) {
      counts.push_back(before + 1 - count);
      before = count;
    }
    return counts;
  }

  /// Attention that a token still receives after a step.
  [[nodiscard]] double to_come(Index token, Index step) const {
    double sum = 0.0;
    for (Index row = step; row < steps(); ++row) {
      sum += at(row, token);
    }
    return sum;
  }

  [[nodiscard]] std::vector<TimedEviction> solve() const {
    return least_loss_evictions({mass.data(), {steps(), tokens()}}, prompt, residents);
  }
};

std::ostream& operator<<(std::ostream& out, const Lane& lane) {
  out << "prompt " << lane.prompt << ", residents";
  for (const Index count : lane.residents) {
    out << ' ' << count;
  }
  for (Index row = 0; row < lane.steps(); ++row) {
    out << "\n ";
    for (Index j = 0; j <= lane.prompt + row; ++j) {
      out << ' ' << lane.at(row, j);
    }
  }
  return out << '\n';
}

double loss(const Lane& lane, const std::vector<TimedEviction>& evictions) {
  double sum = 0.0;
  for (const auto& [token, step] : evictions) {
    sum += lane.to_come(token, step);
  }
  return sum;
}

/// Whether each token leaves at most once and not before it joined, and each step has the evictions that are
/// due.
bool feasible(const Lane& lane, const std::vector<TimedEviction>& evictions) {
  std::set<Index> gone;
  std::vector<Index> counts(lane.residents.size());
  for (const auto& [token, step] : evictions) {
    if (step < 0 || step >= lane.steps() || token < 0 || token >= lane.prompt + step ||
        !gone.insert(token).second) {
      return false;
    }
    ++counts[static_cast<std::size_t>(step)];
  }
  return counts == lane.due();
}

/// The least loss from `step` on when the tokens of the bit set `gone` have left, by trying every set that
/// may leave.
double least_loss(const Lane& lane, Index step = 0, std::uint32_t gone = 0) {
  if (step == lane.steps()) {
    return 0.0;
  }
  const auto due = static_cast<int>(lane.due()[static_cast<std::size_t>(step)]);
  double least = std::numeric_limits<double>::infinity();
  for (std::uint32_t leaving = 0; leaving < (1u << (lane.prompt + step)); ++leaving) {
    if ((leaving & gone) == 0 && std::popcount(leaving) == due) {
      double sum = least_loss(lane, step + 1, gone | leaving);
      for (Index token = 0; token < lane.prompt + step; ++token) {
        sum += (leaving >> token & 1u) != 0 ? lane.to_come(token, step) : 0.0;
      }
      least = std::min(least, sum);
    }
  }
  return least;
}

/// Evicts after each step the tokens with the lowest rank(token, step).
template <typename Rank>
std::vector<TimedEviction> evict_lowest(const Lane& lane, const Rank& rank) {
  std::vector<TimedEviction> evictions;
  std::vector<Index> present(static_cast<std::size_t>(lane.prompt));
  std::iota(present.begin(), present.end(), Index{0});
  const std::vector<Index> due = lane.due();
  for (Index step = 0; step < lane.steps(); ++step) {
    std::ranges::stable_sort(present, {}, [&](Index token) { return rank(token, step); });
    const auto end = present.begin() + due[static_cast<std::size_t>(step)];
    for (auto it = present.begin(); it != end; ++it) {
      evictions.push_back({*it, step});
    }
    present.erase(present.begin(), end);
    present.push_back(lane.prompt + step);
  }
  return evictions;
}

std::vector<TimedEviction> evict_greedily(const Lane& lane) {
  return evict_lowest(lane, [&](Index token, Index step) { return lane.to_come(token, step); });
}

/// The least loss by the Hungarian algorithm, one row an eviction and one column a token: rows enter one by
/// one, each along a shortest path under the potentials of rows (u) and columns (v).
double hungarian_loss(const Lane& lane) {
  constexpr double never =
      0x1p24;  // dearer than all that is allowed together; a few hundred are exact beside 2^-20
  const auto columns = static_cast<std::size_t>(lane.tokens());
  std::vector<std::vector<double>> cost;
  const std::vector<Index> due = lane.due();
  for (Index step = 0; step < lane.steps(); ++step) {
    std::vector<double> row(columns, never);
    for (Index token = 0; token < lane.prompt + step; ++token) {
      row[static_cast<std::size_t>(token)] = lane.to_come(token, step);
    }
    cost.insert(cost.end(), static_cast<std::size_t>(due[static_cast<std::size_t>(step)]), row);
  }
  constexpr std::size_t none = std::numeric_limits<std::size_t>::max();
  std::vector<double> u(cost.size());
  std::vector<double> v(columns + 1);
  std::vector<std::size_t> row_of(columns + 1, none);  // column `columns` stands for the row that enters
  for (std::size_t entering = 0; entering < cost.size(); ++entering) {
    std::vector<double> distance(columns, std::numeric_limits<double>::infinity());
    std::vector<std::size_t> from(columns, columns);
    std::vector<bool> reached(columns + 1);
    std::size_t column = columns;
    row_of[column] = entering;
    while (row_of[column] != none) {
      reached[column] = true;
      const std::size_t row = row_of[column];
      std::size_t next = none;
      for (std::size_t j = 0; j < columns; ++j) {
        if (reached[j]) {
          continue;
        }
        const double reduced = cost[row][j] - u[row] - v[j];
        if (reduced < distance[j]) {
          distance[j] = reduced;
          from[j] = column;
        }
        if (next == none || distance[j] < distance[next]) {
          next = j;
        }
      }
      const double shift = distance[next];
      for (std::size_t j = 0; j <= columns; ++j) {
        if (reached[j]) {
          u[row_of[j]] += shift;
          v[j] -= shift;
        } else {
          distance[j] -= shift;
        }
      }
      column = next;
    }
    for (; column != columns; column = from[column]) {
      row_of[column] = row_of[from[column]];
    }
  }
  double sum = 0.0;
  for (std::size_t j = 0; j < columns; ++j) {
    sum += row_of[j] == none ? 0.0 : cost[row_of[j]][j];
  }
  return sum;
}

/// Numbers of residents that can be. Mostly one leaves at a time: that leaves most to choose from.
std::vector<Index> any_residents(Index prompt, Index steps) {
  std::vector<Index> residents;
  Index most = prompt + 1;
  for (Index step = 0; step < steps; ++step) {
    const Index leaving =
        *rc::gen::weightedOneOf<Index>({{3, rc::gen::just<Index>(1)}, {2, rc::gen::inRange<Index>(0, most)}});
    residents.push_back(std::max<Index>(1, most - leaving));
    most = residents.back() + 1;
  }
  return residents;
}

/// At most 7 tokens and 5 steps, mostly 7 and several; masses of one kind.
rc::Gen<Lane> small_lanes(const rc::Gen<double>& masses) {
  const auto lanes = rc::gen::exec([masses] {
    const Index steps = *rc::gen::element<Index>(1, 2, 3, 3, 4, 4, 5);
    const Index prompt = *rc::gen::oneOf(rc::gen::just(7 - steps), rc::gen::inRange<Index>(1, 8 - steps));
    Lane lane{prompt, any_residents(prompt, steps), {}};
    const auto count = static_cast<std::size_t>(steps * lane.tokens());
    lane.mass = *rc::gen::container<std::vector<double>>(count, masses);
    return lane;
  });
  return rc::gen::resize(rc::kNominalSize, lanes);  // the small numbers of the first cases would all tie
}

rc::Gen<double> multiples(double unit, int most) {
  return rc::gen::map(rc::gen::inRange(0, most + 1), [unit](int count) { return unit * count; });
}

TEST(LeastLoss, IsTheLeastOfAllThereAre) {
  const std::pair<std::string, rc::Gen<double>> kinds[] = {{"masses with many ties", multiples(0.25, 3)},
                                                           {"masses with few", multiples(0x1p-20, 1 << 20)}};
  for (const auto& [kind, masses] : kinds) {
    testing::check_interesting(kind, 0.05, [&masses = masses] {
      const Lane lane = *small_lanes(masses);
      const std::vector<TimedEviction> evictions = lane.solve();
      RC_ASSERT(feasible(lane, evictions));
      RC_ASSERT(loss(lane, evictions) == least_loss(lane));
      return loss(lane, evict_greedily(lane)) > loss(lane, evictions);
    });
  }
}

TEST(LeastLoss, IsTheLeastToWithinItsUnit) {
  const auto masses = rc::gen::map(rc::gen::arbitrary<std::uint64_t>(), [](std::uint64_t bits) {
    return static_cast<double>(bits >> 11) * 0x1p-53;
  });
  testing::check_interesting("masses with 53 bits", 0.05, [&] {
    const Lane lane = *small_lanes(masses);
    const std::vector<TimedEviction> evictions = lane.solve();
    // 2^-40 for each of at most 6 evictions. Both losses are below 2^5, and their sums lose less than 2^-44.
    const double error = loss(lane, evictions) - least_loss(lane);
    RC_ASSERT(-0x1p-44 <= error);
    RC_ASSERT(error <= 6 * 0x1p-40 + 0x1p-44);
    return loss(lane, evict_greedily(lane)) > loss(lane, evictions) + 0x1p-30;
  });
}

/// How evictions of a larger lane are spread over its steps.
enum class Sizes { any, every_step, in_flushes };

/// Attention-like masses, multiples of 2^-20: heavy hitters, a decay with age, zeros, now and then an
/// outlier.
Lane large_lane(Index prompt, Index steps, Sizes sizes, std::uint64_t seed) {
  std::mt19937_64 bits(seed);
  const auto below = [&](std::uint64_t count) { return static_cast<Index>(bits() % count); };
  Lane lane{prompt, {}, {}};
  Index most = prompt - prompt / 4 + 1;
  for (Index step = 1; step <= steps; ++step) {
    Index leaving = 1;
    if (sizes == Sizes::any) {
      leaving = below(4) == 0 ? std::min<Index>(most - 1, below(6)) : 0;
    } else if (sizes == Sizes::in_flushes) {
      leaving = step % 10 == 0 ? 10 : 0;
    }
    lane.residents.push_back(most - leaving);
    most = lane.residents.back() + 1;
  }
  std::vector<Index> heavy(static_cast<std::size_t>(lane.tokens()));
  std::ranges::generate(heavy, [&] { return below(8) == 0 ? 64 : 1; });
  lane.mass.resize(static_cast<std::size_t>(steps * lane.tokens()));
  for (Index row = 0; row < steps; ++row) {
    for (Index j = 0; j <= prompt + row; ++j) {
      const Index age = prompt + row - j;
      const Index size =
          below(64) == 0 ? 1 << 20 : below(1 << 12) * heavy[static_cast<std::size_t>(j)] / (1 + age / 8);
      lane.at(row, j) = below(8) == 0 ? 0.0 : static_cast<double>(size) * 0x1p-20;
    }
  }
  return lane;
}

TEST(LeastLoss, IsThatOfTheHungarianAlgorithm) {
  // 60 slots start from greedy evictions, 150 from merged slots, 600 from slots merged twice.
  const std::pair<Index, Index> shapes[] = {{40, 60}, {80, 150}, {200, 600}};
  for (const auto& [prompt, steps] : shapes) {
    for (const Sizes sizes : {Sizes::any, Sizes::every_step, Sizes::in_flushes}) {
      const Lane lane = large_lane(prompt, steps, sizes, static_cast<std::uint64_t>(steps));
      const std::vector<TimedEviction> evictions = lane.solve();
      ASSERT_TRUE(feasible(lane, evictions));
      EXPECT_EQ(loss(lane, evictions), hungarian_loss(lane)) << steps << " steps";
      EXPECT_LT(loss(lane, evictions), loss(lane, evict_greedily(lane))) << "the case is too easy";
    }
  }
}

TEST(LeastLoss, IsTheSameForMassesThatNeedACoarserUnit) {
  // 2^60 times the masses are whole numbers of 2^40, and their sums would not fit int64 in units of 2^-40.
  const Lane lane = large_lane(80, 150, Sizes::every_step, 1);
  Lane heavy = lane;
  for (double& mass : heavy.mass) {
    mass *= 0x1p60;
  }
  EXPECT_EQ(loss(lane, heavy.solve()), loss(lane, lane.solve()));
}

TEST(LeastLoss, IsNoMoreThanThatOfOtherEvictions) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const Lane lane = large_lane(60, 120, seed % 2 == 0 ? Sizes::any : Sizes::every_step, seed);
    const std::vector<TimedEviction> evictions = lane.solve();
    ASSERT_TRUE(feasible(lane, evictions));
    EXPECT_EQ(lane.solve(), evictions);
    std::mt19937_64 bits(seed);
    const std::map<std::string, std::vector<TimedEviction>> others{
        {"least to come", evict_greedily(lane)},
        {"least at the next step", evict_lowest(lane, [&](Index j, Index step) { return lane.at(step, j); })},
        {"oldest", evict_lowest(lane, [](Index j, Index) { return j; })},
        {"newest", evict_lowest(lane, [](Index j, Index) { return -j; })},
    };
    for (const auto& [name, other] : others) {
      ASSERT_TRUE(feasible(lane, other)) << name;
      EXPECT_LE(loss(lane, evictions), loss(lane, other)) << name;
    }
  }
}

}  // namespace
}  // namespace hae::analysis
