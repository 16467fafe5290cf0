#include "cuda/compact.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "testing/stream.hpp"

namespace hae::device {
namespace {

/// Lanes of one array, and what is kept of them.
struct Cache {
  Index slots = 0;
  Index row_bytes = 0;
  std::vector<Index> lengths;
  std::vector<std::uint8_t> keep;   ///< [lanes, slots]
  std::vector<std::uint8_t> bytes;  ///< [lanes, slots, row_bytes]
};

Cache random_cache(Index slots, Index row_bytes, testing::Stream& stream) {
  Cache cache{.slots = slots, .row_bytes = row_bytes};
  for (const Index share : {0, 1, 2, 3, 4}) {  // nothing stays, some, all
    cache.lengths.push_back(share == 3 ? slots / 2 : slots);
    for (Index slot = 0; slot < slots; ++slot) {
      cache.keep.push_back(stream.below(4) < share ? 1 : 0);
    }
  }
  for (Index i = 0; i < std::ssize(cache.lengths) * slots * row_bytes; ++i) {
    cache.bytes.push_back(static_cast<std::uint8_t>(stream.below(256)));
  }
  return cache;
}

/// The rows that stay of each lane, one after another.
std::vector<std::vector<std::uint8_t>> kept_rows(const Cache& cache) {
  std::vector<std::vector<std::uint8_t>> kept(cache.lengths.size());
  for (Index lane = 0; lane < std::ssize(cache.lengths); ++lane) {
    for (Index slot = 0; slot < cache.lengths[at(lane)]; ++slot) {
      if (cache.keep[at(lane * cache.slots + slot)] != 0) {
        const auto row = cache.bytes.begin() + (lane * cache.slots + slot) * cache.row_bytes;
        kept[at(lane)].insert(kept[at(lane)].end(), row, row + cache.row_bytes);
      }
    }
  }
  return kept;
}

void expect_compacted(const Cache& cache, bool in_place) {
  Array<std::uint8_t> from = copy_of(cache.bytes, nullptr);
  Array<std::uint8_t> to(in_place ? 0 : from.size());
  const Array<std::uint8_t> keep = copy_of(cache.keep, nullptr);
  const Array<Index> lengths = copy_of(cache.lengths, nullptr);
  const Array<std::uint8_t>& result = in_place ? from : to;
  const std::array arrays{CompactedRows{from.data(), result.data(), cache.row_bytes}};
  compact({std::ssize(cache.lengths), cache.slots, keep.data(), lengths.data()}, arrays, lengths.data(),
          nullptr);
  const std::vector<std::uint8_t> bytes = result.read(nullptr);
  const std::vector<Index> kept = lengths.read(nullptr);
  const auto expected = kept_rows(cache);
  for (Index lane = 0; lane < std::ssize(cache.lengths); ++lane) {
    EXPECT_EQ(kept[at(lane)] * cache.row_bytes, std::ssize(expected[at(lane)]));
    const auto begin = bytes.begin() + lane * cache.slots * cache.row_bytes;
    EXPECT_THAT(std::vector<std::uint8_t>(begin, begin + std::ssize(expected[at(lane)])),
                ::testing::ElementsAreArray(expected[at(lane)]))
        << cache.slots << " slots of " << cache.row_bytes << " bytes, lane " << lane;
  }
}

class CompactRows : public ::testing::TestWithParam<Index> {};

TEST_P(CompactRows, KeepsTheOrderOfWhatStaysInPlaceAndElsewhere) {
  testing::Stream stream(static_cast<std::uint64_t>(GetParam()));
  for (const Index slots : {1, 31, 32, 33, 257}) {
    const Cache cache = random_cache(slots, GetParam(), stream);
    expect_compacted(cache, true);
    expect_compacted(cache, false);
  }
}

// 2 bytes is a half of head dimension 1; 8 a position; 26 a half row of 13; 256 a float row of 64.
INSTANTIATE_TEST_SUITE_P(RowBytes, CompactRows, ::testing::Values(2, 4, 8, 16, 26, 256));

TEST(Compact, MovesAllArraysOfACacheTogether) {
  Array<Index> positions = copy_of<Index>({10, 11, 12, 13}, nullptr);
  Array<double> scores = copy_of<double>({0.5, 0.25, 0.125, 2.0}, nullptr);
  const Array<std::uint8_t> keep = copy_of<std::uint8_t>({1, 0, 1, 1}, nullptr);
  const Array<Index> lengths = copy_of<Index>({4}, nullptr);
  const std::array arrays{CompactedRows{positions.data(), positions.data(), sizeof(Index)},
                          CompactedRows{scores.data(), scores.data(), sizeof(double)}};
  compact({1, 4, keep.data(), lengths.data()}, arrays, lengths.data(), nullptr);
  EXPECT_THAT(lengths.read(nullptr), ::testing::ElementsAre(3));
  EXPECT_THAT(positions.read(nullptr), ::testing::ElementsAre(10, 12, 13, 13));
  EXPECT_THAT(scores.read(nullptr), ::testing::ElementsAre(0.5, 0.125, 2.0, 2.0));
}

}  // namespace
}  // namespace hae::device
