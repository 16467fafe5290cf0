#include "sim/weights.hpp"

#include <gtest/gtest.h>
// RapidCheck needs GoogleTest first.
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "testing/generators.hpp"
#include "testing/memory_trace.hpp"

namespace hae {
namespace {

using testing::MemoryTrace;

// Recomputed attention against plain double. A logit of d fused steps and one product by the scale, itself
// rounded, is off by at most (d + 2) u Σ|q_i k_i| · scale, u = 2^-24; the difference from the largest logit
// adds both errors and one rounding; e^x turns an absolute error into a relative one, and adds 2 ulp of its
// own (an ulp is at most 2 u relative).
RC_GTEST_PROP(Weights, RecomputedAttentionIsWithinItsErrorBoundOfDouble, ()) {
  const MemoryTrace trace = *testing::qkv_traces();
  const SequenceInfo& info = trace.info;
  const Index d = *info.head_dim;
  constexpr double kU = 0x1p-24;
  testing::MemorySequence sequence(trace);
  for (Index layer = 0; layer < info.layers; ++layer) {
    const auto payload = sequence.layer(layer);
    LayerWeights weights(info, layer, info.prompt, *payload, NanRule::error, "memory");
    WeightBlock block;
    weights.prompt({0, info.prompt}, block);
    for (Index h = 0; h < info.query_heads; ++h) {
      for (Index r = 0; r < block.rows(); ++r) {
        std::vector<double> z(static_cast<std::size_t>(block.stride),
                              -std::numeric_limits<double>::infinity());
        double magnitude = 0.0;
        double largest = -std::numeric_limits<double>::infinity();
        for (const Range& range : block.visible[static_cast<std::size_t>(r)]) {
          for (Index j = range.begin; j < range.end; ++j) {
            double dot = 0.0;
            double absolute = 0.0;
            for (Index i = 0; i < d; ++i) {
              const double q = trace.queries[static_cast<std::size_t>(layer)][static_cast<std::size_t>(
                  (h * info.tokens + block.queries[static_cast<std::size_t>(r)]) * d + i)];
              const double k =
                  trace.keys[static_cast<std::size_t>(layer)]
                            [static_cast<std::size_t>((h / info.group_heads() * info.tokens + j) * d + i)];
              dot += q * k;
              absolute += std::abs(q * k);
            }
            z[static_cast<std::size_t>(j)] = dot * info.scale;
            magnitude = std::max(magnitude, absolute * info.scale);
            largest = std::max(largest, dot * info.scale);
          }
        }
        const double shift = 2.0 * static_cast<double>(d + 2) * kU * magnitude + 2.0 * magnitude * kU;
        for (Index j = 0; j < block.stride; ++j) {
          const double exact = std::exp(z[static_cast<std::size_t>(j)] - largest);
          const double found = static_cast<double>(block.row(h, r)[j]);
          const double bound = exact * (std::expm1(shift) + 4.0 * kU * (1.0 + shift)) + 0x1p-148;
          RC_ASSERT(std::abs(found - exact) <= bound);  // false for NaN too
        }
      }
    }
  }
}

RC_GTEST_PROP(Weights, EveryRowHasItsLargestWeightExactlyOne, ()) {
  const MemoryTrace trace = *testing::qkv_traces();
  testing::MemorySequence sequence(trace);
  const auto payload = sequence.layer(0);
  LayerWeights weights(trace.info, 0, trace.info.prompt, *payload, NanRule::error, "memory");
  WeightBlock block;
  weights.prompt({0, trace.info.prompt}, block);
  for (Index h = 0; h < trace.info.query_heads; ++h) {
    for (Index r = 0; r < block.rows(); ++r) {
      RC_ASSERT(*std::max_element(block.row(h, r), block.row(h, r) + block.stride) == 1.0f);
    }
  }
}

// The generators must meet the hard values they promise; a property that never sees them proves nothing.
TEST(Generators, HitEveryClassOfRow) {
  Index one_hot = 0;
  Index masked = 0;
  Index subnormal = 0;
  Index ties = 0;
  Index with_zeros = 0;
  Index grouped = 0;
  Index pictures = 0;
  Index no_decode = 0;
  rc::check("generated traces", [&] {
    const MemoryTrace trace = *testing::attention_traces();
    const SequenceInfo& info = trace.info;
    grouped += info.query_heads > info.kv_heads ? 1 : 0;
    pictures += std::ranges::any_of(info.image, [](Index i) { return i > 0; }) ? 1 : 0;
    no_decode += info.steps() == 0 ? 1 : 0;
    for (const std::vector<float>& matrix : trace.attention) {
      for (Index row = 0; row < info.query_heads * info.tokens; ++row) {
        const float* w = matrix.data() + row * info.tokens;
        const Index keys = row % info.tokens + 1;
        const auto ones = std::count(w, w + keys, 1.0f);
        const auto zeros = std::count(w, w + keys, 0.0f);
        masked += zeros == keys ? 1 : 0;
        one_hot += keys > 1 && ones == 1 && zeros == keys - 1 ? 1 : 0;
        with_zeros += zeros > 0 && zeros < keys - 1 ? 1 : 0;
        ties += keys > 1 && ones == 0 && std::count(w, w + keys, w[0]) > 1 ? 1 : 0;
        subnormal +=
            std::any_of(w, w + keys, [](float x) { return std::fpclassify(x) == FP_SUBNORMAL; }) ? 1 : 0;
      }
    }
  });
  for (const Index hits : {one_hot, masked, subnormal, ties, with_zeros}) {
    EXPECT_GE(hits, 20);
  }
  EXPECT_GE(grouped, 20);
  EXPECT_GE(pictures, 20);
  EXPECT_GE(no_decode, 2);
}

}  // namespace
}  // namespace hae
