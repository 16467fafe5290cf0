#include "cuda/decode_attention.hpp"

#include "cuda/for_each_index.hpp"
#include "cuda/parts.hpp"

namespace hae::device {
namespace {

constexpr Index kPartials = arithmetic::kPartials;

/// The KV head that a query head of an item reads, into [items, kv_heads].
HAE_HOST_DEVICE Index kv_head_of(const DecodeAttention& attention, Index item_head) {
  const Index item = item_head / attention.query_heads;
  const Index head = item_head % attention.query_heads;
  return item * attention.kv_heads + head / (attention.query_heads / attention.kv_heads);
}

struct Logits {
  DecodeAttention attention;
  float* logits;  ///< [items, query_heads, slots]

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index out = index;
    const Index slot = take_axis(index, attention.slots);
    const Index kv_head = kv_head_of(attention, index);
    if (slot < attention.lengths[kv_head]) {
      logits[out] =
          arithmetic::logit(attention.queries + index * attention.head_dim,
                            attention.keys + (kv_head * attention.slots + slot) * attention.head_dim,
                            attention.head_dim, attention.scales[index / attention.query_heads]);
    }
  }
};

/// Largest logit of the slots s with s mod 32 = p. A maximum has no order to keep.
struct PartialMaxima {
  DecodeAttention attention;
  const float* logits;
  float* partials;  ///< [items, query_heads, 32]

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index out = index;
    const Index first = take_axis(index, kPartials);
    const Index length = attention.lengths[kv_head_of(attention, index)];
    float largest = -__builtin_inff();
    for (Index slot = first; slot < length; slot += kPartials) {
      const float z = logits[index * attention.slots + slot];
      largest = z > largest ? z : largest;
    }
    partials[out] = largest;
  }
};

struct FoldMaxima {
  const float* partials;
  float* maxima;  ///< [items, query_heads]

  HAE_HOST_DEVICE void operator()(Index index) const {
    float largest = partials[index * kPartials];
    for (Index p = 1; p < kPartials; ++p) {
      const float part = partials[index * kPartials + p];
      largest = part > largest ? part : largest;
    }
    maxima[index] = largest;
  }
};

struct Exponentials {
  DecodeAttention attention;
  const float* maxima;
  float* weights;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index place = index;
    const Index slot = take_axis(index, attention.slots);
    if (slot < attention.lengths[kv_head_of(attention, index)]) {
      weights[place] = arithmetic::exp_nonpositive(weights[place] - maxima[index]);
    }
  }
};

/// Partial sum p: the cached tokens whose position mod 32 is p, ascending.
struct PartialSums {
  DecodeAttention attention;
  const float* weights;
  float* partials;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index out = index;
    const Index partial = take_axis(index, kPartials);
    const Index kv_head = kv_head_of(attention, index);
    const Index* positions = attention.positions + kv_head * attention.slots;
    float sum = 0.0f;
    for (Index slot = 0; slot < attention.lengths[kv_head]; ++slot) {
      if (positions[slot] % kPartials == partial) {
        sum += weights[index * attention.slots + slot];
      }
    }
    partials[out] = sum;
  }
};

struct FoldSums {
  const float* partials;
  float* sums;  ///< [items, query_heads]

  HAE_HOST_DEVICE void operator()(Index index) const {
    float s[arithmetic::kPartials];
    for (Index p = 0; p < kPartials; ++p) {
      s[p] = partials[index * kPartials + p];
    }
    sums[index] = arithmetic::fold(s);
  }
};

struct Normalise {
  DecodeAttention attention;
  const float* sums;
  float* weights;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index place = index;
    const Index slot = take_axis(index, attention.slots);
    if (slot < attention.lengths[kv_head_of(attention, index)]) {
      weights[place] /= sums[index];
    }
  }
};

struct WeightedValues {
  DecodeAttention attention;
  const float* probabilities;
  double* outputs;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index out = index;
    const Index dimension = take_axis(index, attention.head_dim);
    const Index kv_head = kv_head_of(attention, index);
    const float* values = attention.values + kv_head * attention.slots * attention.head_dim + dimension;
    double sum = 0.0;
    for (Index slot = 0; slot < attention.lengths[kv_head]; ++slot) {
      sum = __builtin_fma(static_cast<double>(probabilities[index * attention.slots + slot]),
                          static_cast<double>(values[slot * attention.head_dim]), sum);
    }
    outputs[out] = sum;
  }
};

struct Work {
  float* partials;
  float* of_rows;
  Index bytes;

  Work(void* memory, Index rows) {
    Parts parts(memory);
    partials = parts.take<float>(rows * kPartials);
    of_rows = parts.take<float>(rows);
    bytes = parts.bytes();
  }
};

}  // namespace

Index decode_attention_bytes(Index items, Index query_heads) {
  return Work(nullptr, items * query_heads).bytes;
}

void attend(const DecodeAttention& attention, void* workspace, float* probabilities, double* outputs,
            Stream stream) {
  HAE_EXPECTS(attention.query_heads % attention.kv_heads == 0);
  const Index rows = attention.items * attention.query_heads;
  const Index places = rows * attention.slots;
  const Work work(workspace, rows);
  const char* name = "decode attention";
  for_each_index(name, stream, places, Logits{attention, probabilities});
  for_each_index(name, stream, rows * kPartials, PartialMaxima{attention, probabilities, work.partials});
  for_each_index(name, stream, rows, FoldMaxima{work.partials, work.of_rows});
  for_each_index(name, stream, places, Exponentials{attention, work.of_rows, probabilities});
  for_each_index(name, stream, rows * kPartials, PartialSums{attention, probabilities, work.partials});
  for_each_index(name, stream, rows, FoldSums{work.partials, work.of_rows});
  for_each_index(name, stream, places, Normalise{attention, work.of_rows, probabilities});
  for_each_index(name, stream, rows * attention.head_dim, WeightedValues{attention, probabilities, outputs});
}

}  // namespace hae::device
