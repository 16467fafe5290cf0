#pragma once

// The canonical arithmetic: every operation that decides an eviction, bit for bit the same on every backend,
// compiler, optimisation level, instruction set and thread count. Usable from host and device code. Compile
// with -ffp-contract=off (nvcc: -fmad=false); every fused operation is written out. docs/arithmetic.md states
// the definitions and a table of test values.

#ifdef __FAST_MATH__
#error "the canonical arithmetic needs IEEE semantics: compile without -ffast-math and -Ofast"
#endif

#if defined(__CUDACC__) || defined(__HIPCC__)
#define HAE_HOST_DEVICE __host__ __device__
#else
#define HAE_HOST_DEVICE
#endif

namespace hae::arithmetic {

/// Sums over keys are kept in this many partial sums: partial p takes the keys j with j mod 32 = p,
/// ascending.
inline constexpr int kPartials = 32;

/// a * b + c, rounded once.
HAE_HOST_DEVICE inline float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

/// e^x for x <= 0 in float32, without libm, whose bits differ between machines.
///
/// Cody-Waite: n = round(x / ln 2), r = x - n ln 2 in two fused steps, the Taylor polynomial of degree 7 in r
/// by fused Horner steps, then times 2^n in two exact-until-the-last factors, so that underflow is gradual.
///
/// x        <= 0, not NaN; below -104 the result is +0 (e^-104 < 2^-150)
/// returns  in [0, 1]; exp(0) = 1 exactly
/// error    at most 1 ulp over every 31st float32 in [-104, 0] (tests/sim/arithmetic_test.cpp)
HAE_HOST_DEVICE inline float exp_nonpositive(float x) {
  constexpr float kLog2E = 0x1.715476p+0f;     // float32(log2 e)
  constexpr float kRound = 12582912.0f;        // 1.5 * 2^23: adding it rounds to an integer
  constexpr float kLn2High = 0x1.62e430p-1f;   // float32(ln 2)
  constexpr float kLn2Low = -0x1.05c610p-29f;  // float32(ln 2 - kLn2High)

  const bool underflows = x < -104.0f;
  const float clamped = underflows ? -104.0f : x;
  const float n = fused(clamped, kLog2E, kRound) - kRound;
  float r = fused(n, -kLn2High, clamped);
  r = fused(n, -kLn2Low, r);
  float p = 1.0f / 5040.0f;
  p = fused(p, r, 1.0f / 720.0f);
  p = fused(p, r, 1.0f / 120.0f);
  p = fused(p, r, 1.0f / 24.0f);
  p = fused(p, r, 1.0f / 6.0f);
  p = fused(p, r, 0.5f);
  p = fused(p, r, 1.0f);
  p = fused(p, r, 1.0f);
  const int exponent = static_cast<int>(n);
  const int half = exponent >> 1;
  const float first = __builtin_bit_cast(float, (half + 127) << 23);
  const float second = __builtin_bit_cast(float, (exponent - half + 127) << 23);
  const float scaled = (p * first) * second;
  return underflows ? 0.0f : scaled;
}

/// Folds the partial sums: s[p] += s[p + 16], then + 8, + 4, + 2, + 1. It is what one GPU warp does.
HAE_HOST_DEVICE inline float fold(float (&s)[kPartials]) {
  for (int width = kPartials / 2; width > 0; width /= 2) {
    for (int p = 0; p < width; ++p) {
      s[p] += s[p + width];
    }
  }
  return s[0];
}

/// q . k * scale: starts at +0, one fused multiply-add per dimension, ascending; scale is the stored double
/// rounded once to float32.
HAE_HOST_DEVICE inline float logit(const float* query, const float* key, long long head_dim, float scale) {
  float sum = 0.0f;
  for (long long i = 0; i < head_dim; ++i) {
    sum = fused(query[i], key[i], sum);
  }
  return sum * scale;
}

}  // namespace hae::arithmetic
