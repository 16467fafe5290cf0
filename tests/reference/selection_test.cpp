#include "reference/selection.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <limits>

#include "sim/errors.hpp"

namespace hae::reference {
namespace {

using ::testing::ElementsAre;

std::vector<Index> lowest(const std::vector<double>& scores, Index count) {
  std::vector<Scored> candidates;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    candidates.push_back({scores[i], static_cast<Index>(i)});
  }
  std::vector<Index> tokens;
  for (const Scored& scored : select_lowest(candidates, count)) {
    tokens.push_back(scored.token);
  }
  return tokens;
}

/// What stays, ascending, when the `count` highest of the scores are kept.
std::vector<Index> kept(const std::vector<double>& scores, Index count) {
  const auto size = static_cast<Index>(scores.size());
  const std::vector<Index> gone = lowest(scores, std::max<Index>(0, size - count));
  std::vector<Index> tokens;
  for (Index token = 0; token < size; ++token) {
    if (std::ranges::find(gone, token) == gone.end()) {
      tokens.push_back(token);
    }
  }
  return tokens;
}

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(Selection, EvictsTheLowerScoreAndThenTheOlderToken) {
  // Keeping 2 of (3, 2, 3, 2, 1, 1) leaves {0, 2}; keeping 3 leaves {0, 2, 3}: 4, 5 go, then 1.
  EXPECT_THAT(lowest({3, 2, 3, 2, 1, 1}, 4), ElementsAre(4, 5, 1, 3));
  EXPECT_THAT(lowest({3, 2, 3, 2, 1, 1}, 3), ElementsAre(4, 5, 1));
}

TEST(Selection, TreatsSignedZerosAsEqual) {
  // Keeping 3 of (+0, -0, 1, +0) leaves {1, 2, 3}: the oldest zero goes.
  EXPECT_THAT(lowest({0.0, -0.0, 1.0, 0.0}, 1), ElementsAre(0));
  EXPECT_THAT(lowest({-0.0, 0.0}, 1), ElementsAre(0));
}

TEST(Selection, RanksNanBelowEverything) {
  EXPECT_THAT(lowest(std::vector<double>(8, kNan), 5), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(lowest({0.1, kNan, 0.3, -kNan, 0.2}, 3), ElementsAre(1, 3, 0));
  EXPECT_THAT(lowest({-kInfinity, kNan, kInfinity}, 3), ElementsAre(1, 0, 2));
}

TEST(Selection, KeepsTheNewerOfScoresThatAreAllNanOrAllInfinite) {
  EXPECT_THAT(kept(std::vector<double>(8, kNan), 3), ElementsAre(5, 6, 7));
  EXPECT_THAT(kept({0.1, kNan, 0.3, -kNan, 0.2}, 2), ElementsAre(2, 4));
  EXPECT_THAT(kept(std::vector<double>(5, -kInfinity), 2), ElementsAre(3, 4));
  EXPECT_THAT(kept(std::vector<double>(5, kInfinity), 2), ElementsAre(3, 4));
}

TEST(Selection, KeepsAllWhenMoreAreToBeKeptThanThereAre) {
  EXPECT_THAT(kept({kNan, 0.5, -kInfinity}, 4), ElementsAre(0, 1, 2));
  EXPECT_THAT(kept({}, 1), ElementsAre());
}

TEST(Selection, RefusesMoreThanThereAre) {
  EXPECT_THROW(lowest({1.0}, 2), ContractViolation);
}

}  // namespace
}  // namespace hae::reference
