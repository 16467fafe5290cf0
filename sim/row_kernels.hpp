#pragma once

#include "sim/view.hpp"

// The leaf loops of the engine: the canonical arithmetic of sim/arithmetic.hpp, vectorised across keys and
// never across a sum. Row arrays are indexed by position, start at position 0 and are padded with zeros to a
// multiple of 32 keys.

namespace hae::kernels {

/// Keys of a packed block: [block][dimension][32].
inline constexpr Index kPackedKeys = 32;

/// Length of a row array that holds `keys` keys.
constexpr Index padded(Index keys) {
  return (keys + 31) / 32 * 32;
}

/// Packs K [keys, head_dim] into [ceil(keys / 32)][head_dim][32], the last block filled up with zeros.
void pack_keys(const float* keys, Index key_count, Index head_dim, float* packed);

/// logits[r * stride + j] = scale * q_r . k_j for all keys of blocks [0, ceil(key_count / 32)).
///
/// queries  [rows, head_dim], consecutive rows `query_stride` apart
/// logits   [rows, stride], stride a multiple of 32 and at least key_count
void logits(const float* queries, Index rows, Index query_stride, const float* packed, Index key_count,
            Index head_dim, float scale, float* logits, Index stride);

/// Largest of z[begin .. end), and whether every one of them is finite.
struct Maximum {
  float value;
  bool finite;
};
Maximum maximum(const float* z, Index begin, Index end);

/// z[j] = exp(z[j] - max) for j in [begin, end), in place.
void exponentials(float* z, Index begin, Index end, float max);

/// Canonical sum of w over positions [0, keys); keys a multiple of 32.
float sum(const float* w, Index keys);

/// Canonical sum of w over the positions where keep is 1; keep holds 0 or 1.
float sum_kept(const float* w, const float* keep, Index keys);

/// Canonical sum of w over the positions where keep is 0.
float sum_dropped(const float* w, const float* keep, Index keys);

/// total[j] += double(w[j] * keep[j] / divisor), the division in float32.
void add_normalised(const float* w, const float* keep, float divisor, double* total, Index keys);

/// total[j] = max(total[j], double(w[j] * keep[j] / divisor)).
void max_normalised(const float* w, const float* keep, float divisor, double* total, Index keys);

/// total[j] += addend[j].
void add(const double* addend, double* total, Index keys);

/// values[j] /= divisor.
void divide(double* values, double divisor, Index keys);

/// out[i] = double(w[tokens[i]] / divisor), the division in float32.
void gather_normalised(const float* w, float divisor, std::span<const Index> tokens, double* out);

/// out[r, i] = sum over the listed tokens, ascending, of coefficients[r, t] * double(v[token t, i]).
///
/// The product of two float32 numbers is exact in double, so fused and separate multiply-adds agree.
///
/// coefficients  [rows, tokens] doubles that hold float32 numbers
/// tokens        ascending positions
/// values        [T, head_dim]
/// out           [rows, head_dim]
void weighted_values(const double* coefficients, Index rows, std::span<const Index> tokens,
                     const float* values, Index head_dim, double* out);

/// out[r * stride + t] = a² ‖v_t - o_r‖², a = coefficients[r, t]: the squared pull of one token on a row's
/// output.
///
/// order: ‖·‖² in double, 8 partial sums by dimension (partial p takes d mod 8 = p, ascending), each a fused
/// multiply-add of the difference with itself, then the tree s[p] += s[p + 4], +2, +1; (a · a) · ‖·‖²,
/// rounded at each product
///
/// coefficients  [rows, tokens] probabilities
/// values        [tokens, head_dim], consecutive tokens
/// outputs       [rows, head_dim]
/// out           [rows, stride]
void squared_pulls(const double* coefficients, Index rows, Index tokens, const float* values,
                   const double* outputs, Index head_dim, double* out, Index stride);

/// sums[r] = sum of x[r * stride + t] over the listed tokens, ascending.
void sum_listed(const double* x, Index rows, Index stride, std::span<const Index> tokens, double* sums);

}  // namespace hae::kernels
