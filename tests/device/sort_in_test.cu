#include "cuda/sort_in.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "testing/stream.hpp"

namespace hae::device {
namespace {

struct Less {
  HAE_HOST_DEVICE bool operator()(int a, int b) const { return a < b; }
};

std::vector<int> sorted(const std::vector<int>& numbers) {
  Array<int> there = copy_of(numbers, nullptr);
  const Buffer workspace(sort_workspace_bytes<int>(there.size()));
  sort_in(workspace.data(), there.data(), there.size(), Less{}, nullptr);
  return there.read(nullptr);
}

// With its default order, Thrust 3.0.1's CPU systems give 0 1 -3 -2 -1: the order of the unsigned bits.
TEST(SortIn, OrdersSignedIntegersByTheirValue) {
  EXPECT_THAT(sorted({1, 0, -1, -2, -3}), ::testing::ElementsAre(-3, -2, -1, 0, 1));
}

TEST(SortIn, AgreesWithTheStandardLibrary) {
  testing::Stream stream(64);
  for (const Index count : {1, 31, 64, 1025, 70000}) {
    std::vector<int> numbers;
    for (Index i = 0; i < count; ++i) {
      numbers.push_back(static_cast<int>(stream.below(2000) - 1000));
    }
    std::vector<int> expected = numbers;
    std::ranges::sort(expected);
    EXPECT_EQ(sorted(numbers), expected) << count;
  }
}

}  // namespace
}  // namespace hae::device
