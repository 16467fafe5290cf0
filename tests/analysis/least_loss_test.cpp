#include "analysis/least_loss.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace hae::analysis {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

/// Rows of one lane, one a decode step. What is left out at the end of a row has not joined: NaN, never read.
std::vector<TimedEviction> solve(const std::vector<std::vector<double>>& rows, Index prompt,
                                 const std::vector<Index>& residents, double scale = 1.0) {
  const auto steps = static_cast<Index>(rows.size());
  const auto tokens = static_cast<std::size_t>(prompt + steps);
  std::vector<double> mass;
  for (const std::vector<double>& row : rows) {
    for (std::size_t j = 0; j < tokens; ++j) {
      mass.push_back(j < row.size() ? row[j] * scale : nan);
    }
  }
  return least_loss_evictions({mass.data(), {steps, static_cast<Index>(tokens)}}, prompt, residents);
}

TEST(LeastLoss, EvictsATokenThatIsDearNowWhenAnotherIsCheapLater) {
  // One token of the prompt leaves in the prefill (3 + 1 - 3), one more after step 1 (3 + 1 - 3).
  //
  //             token 0   1   2   3        in the prefill   after step 1
  //   step 1:         3   0   9   1        0: 3 + 0 = 3     0
  //   step 2:         0   4   9   9        1: 0 + 4 = 4     4
  //
  // The cheapest first would be token 0, then token 1: 3 + 4 = 7. Token 1 first costs 4 + 0 = 4.
  const std::vector<std::vector<double>> rows{{3, 0, 9, 1}, {0, 4, 9, 9, 1}};
  EXPECT_THAT(solve(rows, 3, {3, 3}), ElementsAre(TimedEviction{1, 0}, TimedEviction{0, 1}));
}

TEST(LeastLoss, CountsAllThatIsStillToCome) {
  // One of two tokens leaves in the prefill. Token 0 gets nothing at the next step but 0 + 5 in all, token 1
  // gets 1 + 1.
  EXPECT_THAT(solve({{0, 1, 1}, {5, 1, 1, 1}}, 2, {2, 3}), ElementsAre(TimedEviction{1, 0}));
}

TEST(LeastLoss, MayEvictATokenInTheStepItCame) {
  // After step 1 token 0 (still worth 3) or token 1, which came at step 1 (worth 0), leaves.
  EXPECT_THAT(solve({{1, 7}, {3, 0, 5}}, 1, {2, 2}), ElementsAre(TimedEviction{1, 1}));
}

TEST(LeastLoss, EvictsManyAtOnce) {
  // Nothing leaves until step 3; after it 4 + 1 - 2 = 3 of tokens 0..3. The two steps that follow pay them
  // 3 + 3, 1 + 0, 1 + 1 and 1 + 2: token 0 stays.
  const std::vector<std::vector<double>> rows{
      {9, 0}, {9, 0, 0}, {9, 0, 0, 0}, {3, 1, 1, 1, 9}, {3, 0, 1, 2, 9, 9}};
  EXPECT_THAT(solve(rows, 1, {2, 3, 4, 2, 3}),
              ElementsAre(TimedEviction{1, 3}, TimedEviction{2, 3}, TimedEviction{3, 3}));
}

TEST(LeastLoss, OfOneStepIsTheLeastOfItsRow) {
  // 4 + 1 - 3 = 2 of the prompt leave: the lowest of 4, 1, 3, 2. The step's own token cannot.
  EXPECT_THAT(solve({{4, 1, 3, 2, 0}}, 4, {3}), ElementsAre(TimedEviction{1, 0}, TimedEviction{3, 0}));
}

TEST(LeastLoss, EvictsNothingWhereEverythingIsResident) {
  EXPECT_THAT(solve({{1, 2, 3}, {1, 2, 3, 4}}, 2, {3, 4}), IsEmpty());
}

TEST(LeastLoss, EvictsEveryTokenAtOnceWhereOneIsResident) {
  // Only the token of the step is there: the prompt goes in the prefill and each token in the step it came;
  // the last one stays.
  EXPECT_THAT(
      solve({{1, 2, 3}, {1, 2, 3, 4}, {1, 2, 3, 4, 5}}, 2, {1, 1, 1}),
      ElementsAre(TimedEviction{0, 0}, TimedEviction{1, 0}, TimedEviction{2, 1}, TimedEviction{3, 2}));
}

TEST(LeastLoss, IsTheSameAgainWhereEverythingTies) {
  const std::vector<std::vector<double>> rows{{0, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0, 0}};
  const std::vector<TimedEviction> evictions = solve(rows, 2, {2, 2, 2});
  EXPECT_EQ(evictions.size(), 3u);
  EXPECT_EQ(solve(rows, 2, {2, 2, 2}), evictions);
}

TEST(LeastLoss, DoesNotDependOnTheScaleOfMasses) {
  // The first test's lane, from masses of 2^10 units of 2^-40 to those for which only far coarser units fit
  // int64.
  for (const double scale : {0x1p-30, 1.0, 1e5, 1e18, 1e300}) {
    EXPECT_THAT(solve({{3, 0, 9, 1}, {0, 4, 9, 9, 1}}, 3, {3, 3}, scale),
                ElementsAre(TimedEviction{1, 0}, TimedEviction{0, 1}))
        << scale;
  }
}

TEST(LeastLoss, RefusesWhatIsNoMass) {
  for (const double bad : {-1.0, nan, infinity}) {
    EXPECT_THROW(solve({{1, bad, 1}, {1, 1, 1, 1}}, 2, {2, 2}), ContractViolation) << bad;
    EXPECT_THROW(solve({{1, 1, 1}, {1, 1, 1, bad}}, 2, {3, 4}), ContractViolation)
        << bad;  // nothing to evict
  }
  constexpr double most = std::numeric_limits<double>::max();
  EXPECT_THROW(solve({{most, 1, 1}, {most, 1, 1, 1}}, 2, {2, 2}),
               ContractViolation);  // their sum is infinite
}

TEST(LeastLoss, RefusesResidentsThatCannotBe) {
  const std::vector<std::vector<double>> rows{{1, 1, 1}, {1, 1, 1, 1}};
  EXPECT_THROW(solve(rows, 2, {0, 1}), ContractViolation);  // a step has its own token
  EXPECT_THROW(solve(rows, 2, {1, 0}), ContractViolation);
  EXPECT_THROW(solve(rows, 2, {4, 4}), ContractViolation);  // two of the prompt and one
  EXPECT_THROW(solve(rows, 2, {2, 4}), ContractViolation);  // one joins a step
}

TEST(LeastLoss, RefusesShapesThatDisagree) {
  const std::vector<double> mass(8, 1.0);
  const std::vector<Index> residents{2, 2};
  EXPECT_THROW(least_loss_evictions({mass.data(), {2, 4}}, 3, residents), ContractViolation);
  EXPECT_THROW(least_loss_evictions({mass.data(), {2, 4}}, 1, residents), ContractViolation);
  EXPECT_THROW(least_loss_evictions({mass.data(), {1, 4}}, 2, residents), ContractViolation);
  EXPECT_THROW(least_loss_evictions({mass.data(), {2, 2}}, 0, residents), ContractViolation);  // no prompt
  EXPECT_THROW(least_loss_evictions({mass.data(), {0, 2}}, 2, {}), ContractViolation);         // no step
}

}  // namespace
}  // namespace hae::analysis
