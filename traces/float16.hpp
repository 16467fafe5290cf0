#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "sim/view.hpp"

namespace hae::traces {

/// The nearest IEEE half-precision code, ties to even. 65520 and above become infinity; a NaN stays a NaN.
///
/// Our own, because HDF5 1.10 loses the carry into the exponent: it turns 0.124999993 into 0.0625.
[[nodiscard]] std::uint16_t half_from_float(float value);

/// The value of an IEEE half-precision code: exact, subnormals included.
[[nodiscard]] float float_from_half(std::uint16_t code);

/// The nearest bfloat16 code, ties to even. A NaN stays a NaN.
[[nodiscard]] std::uint16_t bfloat16_from_float(float value);

/// The value of a bfloat16 code: exact.
[[nodiscard]] float float_from_bfloat16(std::uint16_t code);

/// How a payload's numbers are stored.
enum class FloatType { float32, float16, bfloat16 };

/// `float32`, `float16` or `bfloat16`.
[[nodiscard]] const char* name_of(FloatType type);

/// Bytes of one stored number.
[[nodiscard]] Index bytes_of(FloatType type);

/// How far from 1 the sum of a stored attention row may be.
[[nodiscard]] double row_sum_tolerance(FloatType type);

/// Numbers to stored codes in native byte order, rounded to nearest even.
///
/// values  [n]
/// codes   [n * bytes_of(type)], not overlapping `values`
/// throws  ContractViolation when the sizes disagree
void encode(FloatType type, std::span<const float> values, std::span<std::byte> codes);

/// Stored codes to numbers. `codes` may be the *tail* of the memory of `values`: then nothing is read after
/// it was overwritten, and a caller needs no second buffer.
///
/// codes    [n * bytes_of(type)]
/// swapped  whether the codes' bytes are in the order this machine does not use
/// values   [n]
/// throws   ContractViolation when the sizes disagree
void decode(FloatType type, bool swapped, std::span<const std::byte> codes, std::span<float> values);

}  // namespace hae::traces
