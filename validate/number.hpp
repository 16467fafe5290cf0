#pragma once

#include <cstddef>
#include <cstdint>

#include "sim/view.hpp"
#include "validate/kernels.h"

namespace hae::validate {

/// The types of kernels.h; the numbers are those of the C header.
enum class Type : std::int32_t {
  float32 = HAE_FLOAT32,
  float16 = HAE_FLOAT16,
  bfloat16 = HAE_BFLOAT16,
  float64 = HAE_FLOAT64,
  int32 = HAE_INT32,
  int64 = HAE_INT64,
  uint8 = HAE_UINT8,
};

/// `float32` and so on.
[[nodiscard]] const char* name_of(Type type);

/// throws  ConfigError for a word that names no type
[[nodiscard]] Type type_of(const char* name);

[[nodiscard]] Index bytes_of(Type type);
[[nodiscard]] bool is_float(Type type);

/// A binary floating-point format: what its roundings can lose.
///
///   fl(x) = x (1 + e) + f    |e| <= unit_roundoff    |f| <= smallest_subnormal / 2, and e f = 0
///
/// Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, (2.8)
struct Format {
  int precision = 24;  ///< bits of the significand, the hidden one counted
  int exponent_bits = 8;

  [[nodiscard]] double unit_roundoff() const;  ///< 2^-precision
  [[nodiscard]] double smallest_normal() const;
  [[nodiscard]] double smallest_subnormal() const;
  [[nodiscard]] double largest() const;
};

/// throws  ContractViolation for an integer type
[[nodiscard]] Format format_of(Type type);

/// The nearest number of the type, ties to even, gradual underflow; beyond the largest an infinity. Integers
/// are rounded to nearest and must fit.
[[nodiscard]] double rounded(Type type, double value);

/// The bytes of a number of this type; `value` is one: rounded(type, value) == value, or a NaN.
void store(Type type, double value, std::byte* bytes);

/// The number that these bytes are: exact for every type but int64, whose numbers stay below 2^53 here.
[[nodiscard]] double load(Type type, const std::byte* bytes);

}  // namespace hae::validate
