#include "traces/float16.hpp"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "sim/errors.hpp"

namespace hae::traces {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// The value of a code from the definition: (-1)^s 2^(e - bias) (1 + m / 2^bits), subnormal when e = 0.
double defined_value(unsigned code, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(code >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const double mantissa = std::ldexp(static_cast<double>(code & ((1u << mantissa_bits) - 1)), -mantissa_bits);
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, 1 - bias) : std::ldexp(1 + mantissa, exponent - bias);
  return (code & 0x8000u) != 0 ? -magnitude : magnitude;
}

TEST(Half, DecodesEveryCodeToItsDefinedValue) {
  for (unsigned code = 0; code < 0x10000; ++code) {
    const float value = float_from_half(static_cast<std::uint16_t>(code));
    if ((code & 0x7C00u) != 0x7C00u) {
      ASSERT_EQ(value, defined_value(code, 5, 10)) << code;
      ASSERT_EQ(std::signbit(value), (code & 0x8000u) != 0) << code;
    } else if ((code & 0x3FFu) == 0) {
      ASSERT_EQ(value, (code & 0x8000u) != 0 ? -kInfinity : kInfinity) << code;
    } else {
      ASSERT_TRUE(std::isnan(value)) << code;
    }
  }
}

TEST(Half, EncodesEveryValueToTheCodeItCameFrom) {
  for (unsigned code = 0; code < 0x10000; ++code) {
    const auto half = static_cast<std::uint16_t>(code);
    const float value = float_from_half(half);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(float_from_half(half_from_float(value)))) << code;
    } else {
      ASSERT_EQ(half_from_float(value), half);
    }
  }
}

TEST(Half, RoundsToTheNearestCodeAndTiesToTheEvenOneBetweenAllNeighbours) {
  for (unsigned code = 0; code < 0x7BFF; ++code) {  // the largest finite half has no finite neighbour above
    const auto below = static_cast<std::uint16_t>(code);
    const auto above = static_cast<std::uint16_t>(code + 1);
    // A half has 11 significant bits, a midpoint 12: exact in float.
    const float midpoint = (float_from_half(below) + float_from_half(above)) / 2;
    ASSERT_EQ(half_from_float(midpoint), code % 2 == 0 ? below : above) << code;
    ASSERT_EQ(half_from_float(std::nextafter(midpoint, 0.0F)), below) << code;
    ASSERT_EQ(half_from_float(std::nextafter(midpoint, kInfinity)), above) << code;
    ASSERT_EQ(half_from_float(-midpoint), half_from_float(midpoint) | 0x8000u) << code;
  }
}

TEST(Half, CarriesIntoTheExponentWhereHdf5LosesTheCarry) {
  // 0.124999993 is nearer to 2^-3 (code 0x3000) than to the half below it; HDF5 1.10 answers 0.0625.
  EXPECT_EQ(half_from_float(0.124999993F), 0x3000);
  // The half grid near 1.5e-05 has steps of 2^-24 = 5.96e-08: 256 of them are 1.52587890625e-05.
  EXPECT_EQ(float_from_half(half_from_float(1.5249285751529568e-05F)), 1.52587890625e-05F);
  EXPECT_EQ(half_from_float(65519.996F), 0x7BFF);  // nearer to 65504
  EXPECT_EQ(half_from_float(65520.0F), 0x7C00);    // half way to 65536: even is infinity
  EXPECT_EQ(half_from_float(std::numeric_limits<float>::max()), 0x7C00);
  EXPECT_EQ(half_from_float(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(half_from_float(-0.0F), 0x8000);
}

TEST(Bfloat16, KeepsEveryCode) {
  for (unsigned code = 0; code < 0x10000; ++code) {
    const auto bfloat = static_cast<std::uint16_t>(code);
    const float value = float_from_bfloat16(bfloat);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(float_from_bfloat16(bfloat16_from_float(value)))) << code;
      continue;
    }
    ASSERT_EQ(bfloat16_from_float(value), bfloat);
    if (std::isfinite(value)) {
      ASSERT_EQ(static_cast<double>(value), defined_value(code, 8, 7)) << code;
    }
  }
}

TEST(Bfloat16, RoundsToTheNearestCodeAndTiesToTheEvenOneBetweenAllNeighbours) {
  for (std::uint32_t code = 0; code < 0x7F80;
       ++code) {  // up to the largest finite value, whose neighbour is infinity
    const std::uint32_t midpoint = code << 16 | 0x8000u;
    ASSERT_EQ(bfloat16_from_float(std::bit_cast<float>(midpoint)), code + code % 2);
    ASSERT_EQ(bfloat16_from_float(std::bit_cast<float>(midpoint - 1)), code);
    ASSERT_EQ(bfloat16_from_float(std::bit_cast<float>(midpoint + 1)), code + 1);
  }
}

TEST(Bfloat16, KeepsANanWhoseLowBitsAreLostANan) {
  EXPECT_TRUE(std::isnan(float_from_bfloat16(bfloat16_from_float(std::bit_cast<float>(0x7F800001u)))));
  EXPECT_TRUE(std::isnan(float_from_half(half_from_float(std::bit_cast<float>(0xFF800001u)))));
}

TEST(Codes, OneBitPatternIsADifferentNumberInEachType) {
  // 0x3F80 as half: 2^(15-15) (1 + 0x380/1024) = 1.875; as bfloat16: the top of float 1.0.
  EXPECT_EQ(float_from_half(0x3F80), 1.875F);
  EXPECT_EQ(float_from_bfloat16(0x3F80), 1.0F);
  // 0x3C00 as half: 1.0; as bfloat16: exponent 120, 2^-7.
  EXPECT_EQ(float_from_half(0x3C00), 1.0F);
  EXPECT_EQ(float_from_bfloat16(0x3C00), 0.0078125F);
}

TEST(Codes, DecodeInPlaceFromTheTailOfTheValues) {
  for (const FloatType type : {FloatType::float32, FloatType::float16, FloatType::bfloat16}) {
    std::vector<float> expected;
    for (int i = 0; i < 5000; ++i) {  // several blocks
      expected.push_back(static_cast<float>(i % 127 - 63) / 8.0F);
    }
    std::vector<float> memory(expected.size());
    const std::span<std::byte> tail = std::as_writable_bytes(std::span(memory))
                                          .last(expected.size() * static_cast<std::size_t>(bytes_of(type)));
    std::vector<std::byte> codes(tail.size());
    encode(type, expected, codes);
    std::memcpy(tail.data(), codes.data(), codes.size());
    decode(type, false, tail, memory);
    EXPECT_EQ(memory, expected) << name_of(type);
  }
}

TEST(Codes, SwapBytesBeforeDecoding) {
  const std::array<std::byte, 4> one{std::byte{0x3F}, std::byte{0x80}, std::byte{0}, std::byte{0}};
  constexpr bool kSwapped = std::endian::native == std::endian::little;
  float value = 0;
  decode(FloatType::float32, kSwapped, one, {&value, 1});
  EXPECT_EQ(value, 1.0F);
  decode(FloatType::bfloat16, kSwapped, std::span(one).first(2), {&value, 1});
  EXPECT_EQ(value, 1.0F);
  decode(FloatType::float16, kSwapped, std::span(one).first(2), {&value, 1});
  EXPECT_EQ(value, 1.875F);
}

TEST(Codes, RefuseSizesThatDisagree) {
  std::array<float, 2> values{};
  std::array<std::byte, 3> codes{};
  EXPECT_THROW(decode(FloatType::float16, false, codes, values), ContractViolation);
  EXPECT_THROW(encode(FloatType::float32, values, codes), ContractViolation);
}

}  // namespace
}  // namespace hae::traces
