#include "cuda/select_lowest.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "testing/stream.hpp"

namespace hae::device {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// The chosen tokens of each lane, in the order of choice, -1 included.
template <typename Score>
std::vector<std::vector<Index>> chosen(const std::vector<std::vector<Score>>& scores,
                                       const std::vector<std::vector<std::uint8_t>>& eligible,
                                       const std::vector<Index>& counts) {
  const Index lanes = std::ssize(scores);
  const Index stride = std::ssize(scores.front());
  const Index most = std::ranges::max(counts);
  std::vector<Score> flat;
  std::vector<std::uint8_t> flags;
  for (Index lane = 0; lane < lanes; ++lane) {
    flat.insert(flat.end(), scores[at(lane)].begin(), scores[at(lane)].end());
    flags.insert(flags.end(), eligible[at(lane)].begin(), eligible[at(lane)].end());
  }
  const Array<Score> scores_there = copy_of(flat, nullptr);
  const Array<std::uint8_t> eligible_there = copy_of(flags, nullptr);
  const Array<Index> counts_there = copy_of(counts, nullptr);
  const Array<Index> out(lanes * most);
  const Buffer workspace(select_lowest_bytes(lanes, stride, most));
  select_lowest(LowestSelection<Score>{lanes, stride, scores_there.data(), eligible_there.data(),
                                       counts_there.data(), most, out.data()},
                workspace.data(), nullptr);
  const std::vector<Index> read = out.read(nullptr);
  std::vector<std::vector<Index>> result;
  for (Index lane = 0; lane < lanes; ++lane) {
    result.emplace_back(read.begin() + lane * most, read.begin() + (lane + 1) * most);
  }
  return result;
}

std::vector<Index> lowest(const std::vector<double>& scores, Index count) {
  return chosen<double>({scores}, {std::vector<std::uint8_t>(scores.size(), 1)}, {count}).front();
}

TEST(SelectLowest, TakesTheOlderOfEqualScoresFirst) {
  // Keeping 2 of 6 evicts 4: the ones, then the twos, each pair from the older.
  EXPECT_THAT(lowest({3, 2, 3, 2, 1, 1}, 4), ElementsAre(4, 5, 1, 3));
  EXPECT_THAT(lowest({3, 2, 3, 2, 1, 1}, 3), ElementsAre(4, 5, 1));
}

TEST(SelectLowest, TakesSignedZerosForEqual) {
  EXPECT_THAT(lowest({+0.0, -0.0, 1.0, +0.0}, 1), ElementsAre(0));
  EXPECT_THAT(lowest({+0.0, -0.0, 1.0, +0.0}, 3), ElementsAre(0, 1, 3));
}

TEST(SelectLowest, RanksNaNBelowEverything) {
  EXPECT_THAT(lowest(std::vector<double>(8, kNaN), 5), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(lowest({0.1, kNaN, 0.3, -kNaN, 0.2}, 3), ElementsAre(1, 3, 0));
  EXPECT_THAT(lowest({0.1, kNaN, -kInfinity, -kNaN, 0.2}, 1), ElementsAre(1));
  EXPECT_THAT(lowest({-kInfinity, kNaN}, 2), ElementsAre(1, 0));
}

TEST(SelectLowest, OrdersInfinities) {
  EXPECT_THAT(lowest(std::vector<double>(5, -kInfinity), 3), ElementsAre(0, 1, 2));
  EXPECT_THAT(lowest({kInfinity, 0.0, -kInfinity}, 3), ElementsAre(2, 1, 0));
}

TEST(SelectLowest, GivesAllTokensWhereMoreAreAsked) {
  EXPECT_THAT(lowest({2, 1, 3}, 5), ElementsAre(1, 0, 2, -1, -1));
  EXPECT_THAT(chosen<double>({{2, 1, 3}}, {{0, 0, 0}}, {1}).front(), ElementsAre(-1));
}

TEST(SelectLowest, LeavesProtectedTokensOutOfTheRanking) {
  // Token 1 is the lowest and protected; no score makes it eligible.
  EXPECT_THAT(chosen<double>({{2, -kInfinity, 3, 1}}, {{1, 0, 1, 1}}, {1}).front(), ElementsAre(3));
  EXPECT_THAT(chosen<double>({{2, -kInfinity, 3, 1}}, {{1, 0, 1, 1}}, {4}).front(), ElementsAre(3, 0, 2, -1));
}

TEST(SelectLowest, GivesEachLaneItsOwnCount) {
  const auto result = chosen<double>({{1, 2}, {2, 1}, {1, 1}}, {{1, 1}, {1, 1}, {1, 1}}, {2, 1, 0});
  EXPECT_THAT(result, ElementsAre(ElementsAre(0, 1), ElementsAre(1, -1), ElementsAre(-1, -1)));
  EXPECT_THAT(chosen<double>({{1, 2}, {2, 1}}, {{1, 1}, {1, 1}}, {0, 1}),
              ElementsAre(ElementsAre(-1), ElementsAre(1)));
}

TEST(SelectLowest, OrdersDrawnPrioritiesAsUnsigned) {
  const std::uint64_t high = std::uint64_t{1} << 63;
  EXPECT_THAT(chosen<std::uint64_t>({{high, 5, high + 1, 5}}, {{1, 1, 1, 1}}, {4}).front(),
              ElementsAre(1, 3, 0, 2));
  EXPECT_THAT(chosen<std::uint64_t>({{high, 5, high + 1, 5}}, {{1, 1, 1, 1}}, {1}).front(), ElementsAre(1));
}

/// What selection means, by looking for the next token again and again.
std::vector<Index> brute_force(const std::vector<double>& scores, std::vector<std::uint8_t> eligible,
                               Index count) {
  std::vector<Index> order;
  for (Index rank = 0; rank < count; ++rank) {
    Index best = -1;
    for (Index j = 0; j < std::ssize(scores); ++j) {
      if (eligible[at(j)] != 0 && (best < 0 || scores[at(j)] < scores[at(best)])) {
        best = j;  // Ascending, and strictly less: the older of equal ones stays.
      }
    }
    order.push_back(best);
    if (best >= 0) {
      eligible[at(best)] = 0;
    }
  }
  return order;
}

class SelectLowestOfManySizes : public ::testing::TestWithParam<Index> {};

TEST_P(SelectLowestOfManySizes, AgreesWithBruteForceInEveryLane) {
  const Index tokens = GetParam();
  testing::Stream stream(static_cast<std::uint64_t>(tokens));
  for (const Index most : {Index{1}, std::max<Index>(2, tokens / 7)}) {
    std::vector<std::vector<double>> scores;
    std::vector<std::vector<std::uint8_t>> eligible;
    std::vector<Index> counts;
    for (const Index distinct : {Index{1}, Index{2}, Index{5}, Index{1} << 40}) {  // all ties to hardly any
      std::vector<double>& row = scores.emplace_back();
      std::vector<std::uint8_t>& flags = eligible.emplace_back();
      for (Index j = 0; j < tokens; ++j) {
        row.push_back(static_cast<double>(stream.below(distinct)) - 2.0);
        flags.push_back(stream.below(5) > 0 ? 1 : 0);
      }
      counts.push_back(distinct == 5 ? 1 : most);
    }
    const auto result = chosen(scores, eligible, counts);
    for (std::size_t lane = 0; lane < scores.size(); ++lane) {
      std::vector<Index> expected = brute_force(scores[lane], eligible[lane], counts[lane]);
      expected.resize(at(most), -1);
      EXPECT_THAT(result[lane], ElementsAreArray(expected)) << "lane " << lane << ", most " << most;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, SelectLowestOfManySizes,
                         ::testing::Values(1, 2, 31, 32, 33, 255, 257, 1023, 1025));

}  // namespace
}  // namespace hae::device
