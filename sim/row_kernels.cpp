#include "sim/row_kernels.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "sim/arithmetic.hpp"

// One clone a function for each generation of x86-64: the bits are the same, because every fused operation is
// written out and contraction is off; only the width of the loops differs. Not with clang: clang 14 compiles
// the clones, but takes these levels for the names of processors, and so chooses the default on every
// processor of a vendor it knows and x86-64-v4 on any other. There, -march chooses the one instruction set.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && !defined(HAE_SINGLE_TARGET)
#define HAE_VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define HAE_VECTORISED
#endif

namespace hae::kernels {
namespace {

constexpr Index kPullKeys = 16;  // 16 sums, and 16 keys of 64 dimensions in 8 KiB of the first cache
constexpr Index kTileRows = 3;   // three rows of 32 sums fill twelve of AVX2's sixteen registers
constexpr Index kPartials = arithmetic::kPartials;

// Inlined into every clone, and so compiled for each of its instruction sets.
#define HAE_INLINE __attribute__((always_inline)) inline

/// Logits of `Rows` consecutive queries against one packed block of 32 keys.
template <Index Rows>
HAE_INLINE void logit_tile(const float* queries, Index query_stride, const float* packed, Index head_dim,
                           float scale, float* logits, Index stride) {
  float sums[Rows][kPackedKeys] = {};
  for (Index i = 0; i < head_dim; ++i) {
    const float* keys = packed + i * kPackedKeys;
    for (Index r = 0; r < Rows; ++r) {
      const float query = queries[r * query_stride + i];
      for (Index k = 0; k < kPackedKeys; ++k) {
        sums[r][k] = __builtin_fmaf(query, keys[k], sums[r][k]);
      }
    }
  }
  for (Index r = 0; r < Rows; ++r) {
    for (Index k = 0; k < kPackedKeys; ++k) {
      logits[r * stride + k] = sums[r][k] * scale;
    }
  }
}

/// Σ c v of `Rows` rows and `Width` dimensions.
template <Index Rows, Index Width>
HAE_INLINE void value_tile(const double* coefficients, const Index* tokens, Index token_count,
                           const float* values, Index head_dim, double* out) {
  double sums[Rows][Width] = {};
  for (Index t = 0; t < token_count; ++t) {
    const float* value = values + tokens[t] * head_dim;
    double wide[Width];
    for (Index i = 0; i < Width; ++i) {
      wide[i] = static_cast<double>(value[i]);
    }
    for (Index r = 0; r < Rows; ++r) {
      const double coefficient = coefficients[r * token_count + t];
      for (Index i = 0; i < Width; ++i) {
        sums[r][i] = __builtin_fma(coefficient, wide[i], sums[r][i]);
      }
    }
  }
  for (Index r = 0; r < Rows; ++r) {
    for (Index i = 0; i < Width; ++i) {
      out[r * head_dim + i] = sums[r][i];
    }
  }
}

/// All dimensions of `Rows` rows, 16 and then 1 at a time.
template <Index Rows>
HAE_INLINE void value_rows(const double* coefficients, const Index* tokens, Index token_count,
                           const float* values, Index head_dim, double* out) {
  Index i = 0;
  for (; i + 16 <= head_dim; i += 16) {
    value_tile<Rows, 16>(coefficients, tokens, token_count, values + i, head_dim, out + i);
  }
  for (; i < head_dim; ++i) {
    value_tile<Rows, 1>(coefficients, tokens, token_count, values + i, head_dim, out + i);
  }
}

/// squares[k] = ‖v_k - o‖² of a block of values, packed [head_dim][kPullKeys].
HAE_INLINE void distance_tile(const double* packed, const double* output, Index head_dim, double* squares) {
  constexpr Index kDistancePartials = 8;
  double partial[kDistancePartials][kPullKeys];
  for (Index p = 0; p < kDistancePartials; ++p) {
    double sums[kPullKeys] = {};
    for (Index d = p; d < head_dim; d += kDistancePartials) {
      for (Index k = 0; k < kPullKeys; ++k) {
        const double difference = packed[d * kPullKeys + k] - output[d];
        sums[k] = __builtin_fma(difference, difference, sums[k]);
      }
    }
    for (Index k = 0; k < kPullKeys; ++k) {
      partial[p][k] = sums[k];
    }
  }
  for (Index k = 0; k < kPullKeys; ++k) {
    const double even = (partial[0][k] + partial[4][k]) + (partial[2][k] + partial[6][k]);
    const double odd = (partial[1][k] + partial[5][k]) + (partial[3][k] + partial[7][k]);
    squares[k] = even + odd;
  }
}

/// Sums of `Rows` rows over the listed tokens.
template <Index Rows>
HAE_INLINE void listed_rows(const double* x, Index stride, const Index* tokens, Index count, double* sums) {
  double running[Rows] = {};
  for (Index t = 0; t < count; ++t) {
    for (Index r = 0; r < Rows; ++r) {
      running[r] += x[r * stride + tokens[t]];
    }
  }
  for (Index r = 0; r < Rows; ++r) {
    sums[r] = running[r];
  }
}

}  // namespace

void pack_keys(const float* keys, Index key_count, Index head_dim, float* packed) {
  const Index blocks = (key_count + kPackedKeys - 1) / kPackedKeys;
  std::fill(packed, packed + blocks * kPackedKeys * head_dim, 0.0f);
  for (Index j = 0; j < key_count; ++j) {
    float* block = packed + j / kPackedKeys * kPackedKeys * head_dim + j % kPackedKeys;
    for (Index i = 0; i < head_dim; ++i) {
      block[i * kPackedKeys] = keys[j * head_dim + i];
    }
  }
}

HAE_VECTORISED void logits(const float* queries, Index rows, Index query_stride, const float* packed,
                           Index key_count, Index head_dim, float scale, float* logits, Index stride) {
  for (Index first = 0; first < key_count; first += kPackedKeys) {
    const float* block = packed + first * head_dim;
    Index r = 0;
    for (; r + kTileRows <= rows; r += kTileRows) {
      logit_tile<kTileRows>(queries + r * query_stride, query_stride, block, head_dim, scale,
                            logits + r * stride + first, stride);
    }
    for (; r < rows; ++r) {
      logit_tile<1>(queries + r * query_stride, query_stride, block, head_dim, scale,
                    logits + r * stride + first, stride);
    }
  }
}

HAE_VECTORISED Maximum maximum(const float* z, Index begin, Index end) {
  constexpr Index kLanes = 32;
  float largest[kLanes];
  float residue[kLanes];  // z - z: +0 for finite z, NaN otherwise
  for (Index k = 0; k < kLanes; ++k) {
    largest[k] = -std::numeric_limits<float>::infinity();
    residue[k] = 0.0f;
  }
  Index j = begin;
  for (; j + kLanes <= end; j += kLanes) {
    for (Index k = 0; k < kLanes; ++k) {
      largest[k] = z[j + k] > largest[k] ? z[j + k] : largest[k];
      residue[k] += z[j + k] - z[j + k];
    }
  }
  for (; j < end; ++j) {
    largest[0] = z[j] > largest[0] ? z[j] : largest[0];
    residue[0] += z[j] - z[j];
  }
  Maximum result{largest[0], true};
  for (Index k = 0; k < kLanes; ++k) {
    result.value = largest[k] > result.value ? largest[k] : result.value;
    result.finite = result.finite && residue[k] == 0.0f;
  }
  return result;
}

HAE_VECTORISED void exponentials(float* z, Index begin, Index end, float max) {
  for (Index j = begin; j < end; ++j) {
    z[j] = arithmetic::exp_nonpositive(z[j] - max);
  }
}

HAE_VECTORISED float sum(const float* w, Index keys) {
  float partial[kPartials] = {};
  for (Index j = 0; j < keys; j += kPartials) {
    for (Index p = 0; p < kPartials; ++p) {
      partial[p] += w[j + p];
    }
  }
  return arithmetic::fold(partial);
}

HAE_VECTORISED float sum_kept(const float* w, const float* keep, Index keys) {
  float partial[kPartials] = {};
  for (Index j = 0; j < keys; j += kPartials) {
    for (Index p = 0; p < kPartials; ++p) {
      partial[p] += w[j + p] * keep[j + p];
    }
  }
  return arithmetic::fold(partial);
}

HAE_VECTORISED float sum_dropped(const float* w, const float* keep, Index keys) {
  float partial[kPartials] = {};
  for (Index j = 0; j < keys; j += kPartials) {
    for (Index p = 0; p < kPartials; ++p) {
      partial[p] += w[j + p] * (1.0f - keep[j + p]);
    }
  }
  return arithmetic::fold(partial);
}

HAE_VECTORISED void add_normalised(const float* w, const float* keep, float divisor, double* total,
                                   Index keys) {
  for (Index j = 0; j < keys; ++j) {
    total[j] += static_cast<double>(w[j] * keep[j] / divisor);
  }
}

HAE_VECTORISED void max_normalised(const float* w, const float* keep, float divisor, double* total,
                                   Index keys) {
  for (Index j = 0; j < keys; ++j) {
    const double a = static_cast<double>(w[j] * keep[j] / divisor);
    total[j] = a > total[j] ? a : total[j];
  }
}

HAE_VECTORISED void add(const double* addend, double* total, Index keys) {
  for (Index j = 0; j < keys; ++j) {
    total[j] += addend[j];
  }
}

HAE_VECTORISED void divide(double* values, double divisor, Index keys) {
  for (Index j = 0; j < keys; ++j) {
    values[j] /= divisor;
  }
}

HAE_VECTORISED void gather_normalised(const float* w, float divisor, std::span<const Index> tokens,
                                      double* out) {
  const Index* token = tokens.data();
  const auto count = static_cast<Index>(tokens.size());
  for (Index i = 0; i < count; ++i) {
    out[i] = static_cast<double>(w[token[i]] / divisor);
  }
}

HAE_VECTORISED void weighted_values(const double* coefficients, Index rows, std::span<const Index> tokens,
                                    const float* values, Index head_dim, double* out) {
  const auto count = static_cast<Index>(tokens.size());
  Index r = 0;
  for (; r + 2 <= rows; r += 2) {
    value_rows<2>(coefficients + r * count, tokens.data(), count, values, head_dim, out + r * head_dim);
  }
  for (; r < rows; ++r) {
    value_rows<1>(coefficients + r * count, tokens.data(), count, values, head_dim, out + r * head_dim);
  }
}

HAE_VECTORISED void squared_pulls(const double* coefficients, Index rows, Index tokens, const float* values,
                                  const double* outputs, Index head_dim, double* out, Index stride) {
  std::vector<double> packed(static_cast<std::size_t>(head_dim * kPullKeys));
  for (Index first = 0; first < tokens; first += kPullKeys) {
    const Index count = std::min(kPullKeys, tokens - first);
    for (Index k = 0; k < count; ++k) {
      for (Index d = 0; d < head_dim; ++d) {
        packed[static_cast<std::size_t>(d * kPullKeys + k)] =
            static_cast<double>(values[(first + k) * head_dim + d]);
      }
    }
    for (Index r = 0; r < rows; ++r) {
      double squares[kPullKeys];
      distance_tile(packed.data(), outputs + r * head_dim, head_dim, squares);
      for (Index k = 0; k < count; ++k) {
        const double a = coefficients[r * tokens + first + k];
        out[r * stride + first + k] = a * a * squares[k];
      }
    }
  }
}

void sum_listed(const double* x, Index rows, Index stride, std::span<const Index> tokens, double* sums) {
  constexpr Index kTile = 4;  // a row's additions wait for each other; those of other rows fill the time
  const auto count = static_cast<Index>(tokens.size());
  Index r = 0;
  for (; r + kTile <= rows; r += kTile) {
    listed_rows<kTile>(x + r * stride, stride, tokens.data(), count, sums + r);
  }
  for (; r < rows; ++r) {
    listed_rows<1>(x + r * stride, stride, tokens.data(), count, sums + r);
  }
}

}  // namespace hae::kernels
