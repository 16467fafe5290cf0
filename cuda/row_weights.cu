#include "cuda/row_weights.hpp"

#include "cuda/for_each_index.hpp"

namespace hae::device {
namespace {

constexpr Index kPartials = arithmetic::kPartials;

HAE_HOST_DEVICE bool is_finite(float x) {
  return x - x == 0.0f;
}

struct PackKeys {
  const float* keys;
  float* packed;
  Index kv_heads, tokens, head_dim, packed_tokens;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index place = index;
    const Index in_block = take_axis(index, kPartials);
    const Index dimension = take_axis(index, head_dim);
    const Index block = take_axis(index, packed_tokens / kPartials);
    const Index token = block * kPartials + in_block;
    packed[place] = token < tokens ? keys[(index * tokens + token) * head_dim + dimension] : 0.0f;
  }
};

/// The row that an index into the active rows of all heads names.
struct Place {
  Index item, head, query;
  Index row_of_heads;  ///< into [items, query_heads, rows]

  HAE_HOST_DEVICE Place(const RowBlock& block, Index index) {
    const Index row = block.active.begin + take_axis(index, block.active.end - block.active.begin);
    head = take_axis(index, block.query_heads);
    item = index;
    query = block.queries[item * block.rows + row];
    row_of_heads = (item * block.query_heads + head) * block.rows + row;
  }
};

struct Logits {
  RowBlock block;
  QueriesAndKeys from;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index key = take_axis(index, block.keys);
    const Place place(block, index);
    if (place.query < 0 || !block.masks[place.item].sees(place.query, key)) {
      return;
    }
    const float* query =
        from.queries +
        ((place.item * block.query_heads + place.head) * from.tokens + place.query) * from.head_dim;
    const Index kv_head = place.item * block.kv_heads + place.head / (block.query_heads / block.kv_heads);
    const float* keys = from.keys +
                        (kv_head * from.packed_tokens + key / kPartials * kPartials) * from.head_dim +
                        key % kPartials;
    // arithmetic::logit over keys that lie 32 numbers apart.
    float sum = 0.0f;
    for (Index i = 0; i < from.head_dim; ++i) {
      sum = arithmetic::fused(query[i], keys[i * kPartials], sum);
    }
    block.weights[place.row_of_heads * block.keys + key] = sum * from.scales[place.item];
  }
};

/// Largest finite logit among the keys j with j mod 32 = p; -infinity if there is none.
struct PartialMaxima {
  RowBlock block;
  float* maxima;      ///< [active rows, 32]
  std::uint8_t* bad;  ///< [active rows, 32]

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index out = index;
    const Index partial = take_axis(index, kPartials);
    const Place place(block, index);
    float largest = -__builtin_inff();
    std::uint8_t is_bad = 0;
    for (Index key = partial; place.query >= 0 && key < block.keys; key += kPartials) {
      if (!block.masks[place.item].sees(place.query, key)) {
        continue;
      }
      const float z = block.weights[place.row_of_heads * block.keys + key];
      if (!is_finite(z)) {
        is_bad = 1;
      } else if (z > largest) {
        largest = z;
      }
    }
    maxima[out] = largest;
    bad[out] = is_bad;
  }
};

struct FoldMaxima {
  const float* maxima;
  const std::uint8_t* bad;
  float* largest;          ///< [active rows]
  std::uint8_t* bad_rows;  ///< [active rows]

  HAE_HOST_DEVICE void operator()(Index index) const {
    float all = maxima[index * kPartials];
    std::uint8_t is_bad = bad[index * kPartials];
    for (Index p = 1; p < kPartials; ++p) {
      const float part = maxima[index * kPartials + p];
      all = part > all ? part : all;
      is_bad |= bad[index * kPartials + p];
    }
    largest[index] = all;
    bad_rows[index] = is_bad;
  }
};

struct CollectBad {
  const std::uint8_t* bad_rows;
  Index of_item;  ///< active rows of one item
  std::uint8_t* is_bad;

  HAE_HOST_DEVICE void operator()(Index item) const {
    for (Index i = 0; i < of_item; ++i) {
      if (bad_rows[item * of_item + i] != 0) {
        is_bad[item] = 1;
      }
    }
  }
};

struct Exponentials {
  RowBlock block;
  const float* largest;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index key = take_axis(index, block.keys);
    const Index active_row = index;
    const Place place(block, active_row);
    float& weight = block.weights[place.row_of_heads * block.keys + key];
    const bool is_seen = place.query >= 0 && block.masks[place.item].sees(place.query, key);
    weight = is_seen && is_finite(weight) ? arithmetic::exp_nonpositive(weight - largest[active_row]) : 0.0f;
  }
};

/// Partial sum p of a row: keys j with j mod 32 = p, ascending; those that are not resident count as +0.
struct PartialSums {
  RowBlock block;
  const std::uint8_t* resident;  ///< null: all keys count
  Index lanes, stride;
  float* partials;  ///< [active rows, 32]

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index out = index;
    const Index partial = take_axis(index, kPartials);
    const Place place(block, index);
    if (place.query < 0) {
      return;
    }
    const float* weights = block.weights + place.row_of_heads * block.keys;
    const std::uint8_t* keep = nullptr;
    if (resident != nullptr) {
      keep = resident + (place.item * lanes + place.head / (block.query_heads / lanes)) * stride;
    }
    float sum = 0.0f;
    for (Index key = partial; key < block.keys; key += kPartials) {
      sum += keep == nullptr || keep[key] != 0 ? weights[key] : 0.0f;
    }
    partials[out] = sum;
  }
};

struct FoldSums {
  RowBlock block;
  const float* partials;
  float* sums;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Place place(block, index);
    if (place.query < 0) {
      return;
    }
    float s[arithmetic::kPartials];
    for (Index p = 0; p < kPartials; ++p) {
      s[p] = partials[index * kPartials + p];
    }
    sums[place.row_of_heads] = arithmetic::fold(s);
  }
};

void sum_rows(const RowBlock& block, const std::uint8_t* resident, Index lanes, Index stride, float* partials,
              float* sums, Stream stream) {
  const Index rows = block.active_rows();
  for_each_index("summing weights", stream, rows * kPartials,
                 PartialSums{block, resident, lanes, stride, partials});
  for_each_index("summing weights", stream, rows, FoldSums{block, partials, sums});
}

}  // namespace

void pack_keys(const float* keys, Index kv_heads, Index tokens, Index head_dim, Index packed_tokens,
               float* packed, Stream stream) {
  HAE_EXPECTS(packed_tokens % kPartials == 0 && packed_tokens >= tokens);
  for_each_index("packing keys", stream, kv_heads * packed_tokens * head_dim,
                 PackKeys{keys, packed, kv_heads, tokens, head_dim, packed_tokens});
}

Index row_workspace_bytes(Index active_rows) {
  // 32 partial sums or maxima and the maximum of all, and a flag beside each of these.
  return active_rows * (kPartials + 1) * Index{sizeof(float) + sizeof(std::uint8_t)};
}

void form_weights(const RowBlock& block, const QueriesAndKeys& from, void* workspace, std::uint8_t* is_bad,
                  Stream stream) {
  HAE_EXPECTS(block.keys % kPartials == 0 && block.keys <= from.packed_tokens);
  const Index rows = block.active_rows();
  float* partials = static_cast<float*>(workspace);
  float* largest = partials + rows * kPartials;
  auto* bad = reinterpret_cast<std::uint8_t*>(largest + rows);
  std::uint8_t* bad_rows = bad + rows * kPartials;
  for_each_index("forming logits", stream, rows * block.keys, Logits{block, from});
  for_each_index("forming weights", stream, rows * kPartials, PartialMaxima{block, partials, bad});
  for_each_index("forming weights", stream, rows, FoldMaxima{partials, bad, largest, bad_rows});
  for_each_index("forming weights", stream, block.items, CollectBad{bad_rows, rows / block.items, is_bad});
  for_each_index("forming weights", stream, rows * block.keys, Exponentials{block, largest});
  sum_weights(block, workspace, stream);
}

void sum_weights(const RowBlock& block, void* workspace, Stream stream) {
  sum_rows(block, nullptr, 1, 0, static_cast<float*>(workspace), block.sums, stream);
}

void sum_residents(const RowBlock& block, const std::uint8_t* resident, Index lanes, Index stride,
                   void* workspace, float* sums, Stream stream) {
  HAE_EXPECTS(block.keys <= stride && block.query_heads % lanes == 0);
  sum_rows(block, resident, lanes, stride, static_cast<float*>(workspace), sums, stream);
}

}  // namespace hae::device
