#include "traces/float16.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "sim/errors.hpp"

namespace hae::traces {
namespace {

constexpr std::uint32_t kInfinity = 0x7F800000u;

/// value / 2^shift to the nearest integer, ties to even. A carry runs on into the exponent, which is right.
constexpr std::uint32_t shift_to_nearest_even(std::uint32_t value, std::uint32_t shift) {
  const std::uint32_t quotient = value >> shift;
  const std::uint32_t remainder = value & ((1u << shift) - 1u);
  const std::uint32_t tie = 1u << (shift - 1u);
  const bool up = remainder > tie || (remainder == tie && (quotient & 1u) != 0u);
  return quotient + (up ? 1u : 0u);
}

constexpr std::uint32_t half_magnitude(std::uint32_t magnitude) {
  if (magnitude > kInfinity) {
    return 0x7E00u | ((magnitude >> 13) & 0x3FFu);  // the quiet bit keeps a NaN whose low bits are lost a NaN
  }
  if (magnitude >= 0x477FF000u) {  // 65520, half way from the largest half to the next power of two
    return 0x7C00u;
  }
  if (magnitude >= 0x38800000u) {  // 2^-14, the smallest normal half: only the exponent's bias changes
    return shift_to_nearest_even(magnitude - 0x38000000u, 13);
  }
  if (magnitude < 0x33000000u) {  // below 2^-25, half of the smallest subnormal
    return 0;
  }
  // The significand counts units of 2^(exponent - 150); a subnormal half counts units of 2^-24.
  const std::uint32_t exponent = magnitude >> 23;
  return shift_to_nearest_even((magnitude & 0x7FFFFFu) | 0x800000u, 126u - exponent);
}

template <typename Code>
Code load(const std::byte* bytes, bool swapped) {
  Code code;
  std::memcpy(&code, bytes, sizeof code);
  if (!swapped) {
    return code;
  }
  if constexpr (sizeof code == 2) {
    return __builtin_bswap16(code);
  } else {
    return __builtin_bswap32(code);
  }
}

template <typename Code, typename ToFloat>
void decode_all(bool swapped, std::span<const std::byte> codes, std::span<float> values, ToFloat to_float) {
  // Ascending, through a block of its own: when the codes are the tail of the values' memory, value i ends at
  // byte 4i + 4, and the codes not yet read begin at byte (4 - sizeof(Code)) * n + sizeof(Code) * (i + 1).
  constexpr std::size_t kBlock = 1024;
  std::array<Code, kBlock> block;
  for (std::size_t first = 0; first < values.size(); first += kBlock) {
    const std::size_t count = std::min(kBlock, values.size() - first);
    for (std::size_t i = 0; i < count; ++i) {
      block[i] = load<Code>(codes.data() + (first + i) * sizeof(Code), swapped);
    }
    for (std::size_t i = 0; i < count; ++i) {
      values[first + i] = to_float(block[i]);
    }
  }
}

template <typename Code, typename FromFloat>
void encode_all(std::span<const float> values, std::span<std::byte> codes, FromFloat from_float) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    const Code code = from_float(values[i]);
    std::memcpy(codes.data() + i * sizeof code, &code, sizeof code);
  }
}

bool sizes_agree(FloatType type, std::size_t values, std::size_t bytes) {
  return bytes == values * static_cast<std::size_t>(bytes_of(type));
}

/// Branch-free, so that decoding an array vectorises: the bits are those of the value times 2^-112.
inline float half_value(std::uint16_t code) {
  const std::uint32_t shifted = static_cast<std::uint32_t>(code & 0x7FFFu) << 13;
  const std::uint32_t finite = std::bit_cast<std::uint32_t>(std::bit_cast<float>(shifted) * 0x1p112F);
  const std::uint32_t magnitude = shifted >= 0x0F800000u ? shifted | kInfinity : finite;
  return std::bit_cast<float>(magnitude | (static_cast<std::uint32_t>(code & 0x8000u) << 16));
}

inline float bfloat16_value(std::uint16_t code) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(code) << 16);
}

}  // namespace

std::uint16_t half_from_float(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>(((bits >> 16) & 0x8000u) | half_magnitude(bits & 0x7FFFFFFFu));
}

float float_from_half(std::uint16_t code) {
  return half_value(code);
}

std::uint16_t bfloat16_from_float(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const bool is_nan = (bits & 0x7FFFFFFFu) > kInfinity;
  return static_cast<std::uint16_t>(is_nan ? (bits >> 16) | 0x40u : shift_to_nearest_even(bits, 16));
}

float float_from_bfloat16(std::uint16_t code) {
  return bfloat16_value(code);
}

const char* name_of(FloatType type) {
  switch (type) {
    case FloatType::float32:
      return "float32";
    case FloatType::float16:
      return "float16";
    case FloatType::bfloat16:
      return "bfloat16";
  }
  return "";
}

Index bytes_of(FloatType type) {
  return type == FloatType::float32 ? 4 : 2;
}

double row_sum_tolerance(FloatType type) {
  switch (type) {
    case FloatType::float32:
      return 1e-4;
    case FloatType::float16:
      return 2e-3;
    case FloatType::bfloat16:
      return 1e-2;
  }
  return 0;
}

void encode(FloatType type, std::span<const float> values, std::span<std::byte> codes) {
  HAE_EXPECTS(sizes_agree(type, values.size(), codes.size()));
  switch (type) {
    case FloatType::float32:
      if (!values.empty()) {
        std::memcpy(codes.data(), values.data(), codes.size());
      }
      return;
    case FloatType::float16:
      return encode_all<std::uint16_t>(values, codes, half_from_float);
    case FloatType::bfloat16:
      return encode_all<std::uint16_t>(values, codes, bfloat16_from_float);
  }
}

void decode(FloatType type, bool swapped, std::span<const std::byte> codes, std::span<float> values) {
  HAE_EXPECTS(sizes_agree(type, values.size(), codes.size()));
  switch (type) {
    case FloatType::float32:
      return decode_all<std::uint32_t>(swapped, codes, values,
                                       [](std::uint32_t code) { return std::bit_cast<float>(code); });
    case FloatType::float16:
      return decode_all<std::uint16_t>(swapped, codes, values, half_value);
    case FloatType::bfloat16:
      return decode_all<std::uint16_t>(swapped, codes, values, bfloat16_value);
  }
}

}  // namespace hae::traces
