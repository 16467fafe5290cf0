#include "cuda/decode_attention.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "sim/row_kernels.hpp"
#include "testing/stream.hpp"

// Against the engine's leaf loops, which hold a row by position and know nothing of slots: bit for bit.

namespace hae::device {
namespace {

/// Caches of one or more sequences, from which tokens were evicted.
struct Caches {
  DecodeAttention shape;
  Index tokens = 0;
  std::vector<float> scales, queries, keys, values;
  std::vector<Index> positions, lengths;
};

Caches random_caches(Index items, Index query_heads, Index kv_heads, Index head_dim, Index tokens) {
  testing::Stream stream(static_cast<std::uint64_t>(tokens * 100 + head_dim));
  Caches caches;
  caches.shape = {.items = items,
                  .query_heads = query_heads,
                  .kv_heads = kv_heads,
                  .head_dim = head_dim,
                  .slots = tokens};
  caches.tokens = tokens;
  const auto fill = [&](std::vector<float>& numbers, Index count, float factor) {
    for (Index i = 0; i < count; ++i) {
      numbers.push_back(factor * stream.signed_unit());
    }
  };
  for (Index item = 0; item < items; ++item) {
    caches.scales.push_back(static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim + item))));
  }
  fill(caches.queries, items * query_heads * head_dim, 4.0f);
  fill(caches.keys, items * kv_heads * tokens * head_dim, 4.0f);
  fill(caches.values, items * kv_heads * tokens * head_dim, 1.0f);
  for (Index lane = 0; lane < items * kv_heads; ++lane) {
    // Lane 0 holds everything; the others lost tokens, the last most of them.
    Index length = 0;
    std::vector<Index> row;
    for (Index token = 0; token < tokens; ++token) {
      if (lane == 0 || stream.below(1 + lane) == 0 || token == tokens - 1) {
        row.push_back(token);
        ++length;
      }
    }
    row.resize(at(tokens), -1);
    caches.positions.insert(caches.positions.end(), row.begin(), row.end());
    caches.lengths.push_back(length);
  }
  return caches;
}

/// One row by position, as the engine forms it.
void expect_row(const Caches& caches, Index item, Index head, const float* probabilities,
                const double* output) {
  const DecodeAttention& shape = caches.shape;
  const Index lane = item * shape.kv_heads + head / (shape.query_heads / shape.kv_heads);
  const Index padded = kernels::padded(caches.tokens);
  std::vector<float> by_position(at(padded), 0.0f);
  std::vector<float> packed(at(padded * shape.head_dim));
  std::vector<float> placed(at(caches.tokens * shape.head_dim), 0.0f);
  std::vector<Index> slots(at(caches.lengths[at(lane)]));
  std::iota(slots.begin(), slots.end(), 0);
  for (const Index slot : slots) {
    const float* key = caches.keys.data() + (lane * shape.slots + slot) * shape.head_dim;
    std::copy_n(key, shape.head_dim,
                placed.begin() + caches.positions[at(lane * shape.slots + slot)] * shape.head_dim);
  }
  kernels::pack_keys(placed.data(), caches.tokens, shape.head_dim, packed.data());
  std::vector<float> z(at(padded));
  kernels::logits(caches.queries.data() + (item * shape.query_heads + head) * shape.head_dim, 1,
                  shape.head_dim, packed.data(), caches.tokens, shape.head_dim, caches.scales[at(item)],
                  z.data(), padded);
  float largest = -std::numeric_limits<float>::infinity();
  for (const Index slot : slots) {
    largest = std::max(largest, z[at(caches.positions[at(lane * shape.slots + slot)])]);
  }
  for (const Index slot : slots) {
    const Index position = caches.positions[at(lane * shape.slots + slot)];
    by_position[at(position)] = z[at(position)];
    kernels::exponentials(by_position.data(), position, position + 1, largest);
  }
  const float sum = kernels::sum(by_position.data(), padded);
  std::vector<double> coefficients;
  for (const Index slot : slots) {
    const float a = by_position[at(caches.positions[at(lane * shape.slots + slot)])] / sum;
    coefficients.push_back(static_cast<double>(a));
    ASSERT_EQ(probabilities[slot], a) << "item " << item << ", head " << head << ", slot " << slot;
  }
  std::vector<double> expected(at(shape.head_dim));
  kernels::weighted_values(coefficients.data(), 1, slots,
                           caches.values.data() + lane * shape.slots * shape.head_dim, shape.head_dim,
                           expected.data());
  for (Index d = 0; d < shape.head_dim; ++d) {
    ASSERT_EQ(output[d], expected[at(d)]) << "item " << item << ", head " << head << ", dimension " << d;
  }
}

void expect_canonical(const Caches& caches) {
  DecodeAttention attention = caches.shape;
  const Array<float> scales = copy_of(caches.scales, nullptr);
  const Array<float> queries = copy_of(caches.queries, nullptr);
  const Array<float> keys = copy_of(caches.keys, nullptr);
  const Array<float> values = copy_of(caches.values, nullptr);
  const Array<Index> positions = copy_of(caches.positions, nullptr);
  const Array<Index> lengths = copy_of(caches.lengths, nullptr);
  attention.scales = scales.data();
  attention.queries = queries.data();
  attention.keys = keys.data();
  attention.values = values.data();
  attention.positions = positions.data();
  attention.lengths = lengths.data();
  const Index rows = attention.items * attention.query_heads;
  Array<float> probabilities(rows * attention.slots);
  probabilities.clear(nullptr);
  const Array<double> outputs(rows * attention.head_dim);
  const Buffer workspace(decode_attention_bytes(attention.items, attention.query_heads));
  attend(attention, workspace.data(), probabilities.data(), outputs.data(), nullptr);
  const std::vector<float> a = probabilities.read(nullptr);
  const std::vector<double> o = outputs.read(nullptr);
  for (Index row = 0; row < rows; ++row) {
    expect_row(caches, row / attention.query_heads, row % attention.query_heads,
               a.data() + row * attention.slots, o.data() + row * attention.head_dim);
  }
}

class DecodeAttentionOfManySizes : public ::testing::TestWithParam<Index> {};

TEST_P(DecodeAttentionOfManySizes, HasTheBitsOfTheEngine) {
  expect_canonical(random_caches(1, 1, 1, 16, GetParam()));
  expect_canonical(random_caches(2, 6, 3, 5, GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Sizes, DecodeAttentionOfManySizes,
                         ::testing::Values(1, 2, 31, 32, 33, 255, 257, 1023, 1025));

TEST(DecodeAttention, OfAnEmptyCacheIsZero) {
  Caches caches = random_caches(1, 2, 1, 4, 8);
  caches.lengths = {0};
  expect_canonical(caches);
}

}  // namespace
}  // namespace hae::device
