#include "validate/number.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "sim/errors.hpp"

namespace hae::validate {
namespace {

struct Named {
  Type type;
  const char* name;
  Index bytes;
};

constexpr Named kTypes[] = {
    {Type::float32, "float32", 4}, {Type::float16, "float16", 2}, {Type::bfloat16, "bfloat16", 2},
    {Type::float64, "float64", 8}, {Type::int32, "int32", 4},     {Type::int64, "int64", 8},
    {Type::uint8, "uint8", 1},
};

const Named& named(Type type) {
  for (const Named& entry : kTypes) {
    if (entry.type == type) {
      return entry;
    }
  }
  throw ContractViolation("a type of kernels.h");
}

/// The code of a number of a 16-bit format: sign, exponent, significand.
std::uint16_t code_of(const Format& format, double value) {
  const int stored = format.precision - 1;
  const auto sign = static_cast<unsigned>(std::signbit(value)) << 15;
  const unsigned all_ones = ((1u << format.exponent_bits) - 1u) << stored;
  const double magnitude = std::fabs(value);
  if (std::isnan(value)) {
    return static_cast<std::uint16_t>(sign | all_ones | (1u << (stored - 1)));
  }
  if (std::isinf(value)) {
    return static_cast<std::uint16_t>(sign | all_ones);
  }
  // Subnormals and normals are one scale: the significand in units of the last place, plus the exponent above
  // the smallest, whose hidden bit the addition carries in.
  const int smallest = 2 - (1 << (format.exponent_bits - 1));
  const int exponent = magnitude == 0 ? smallest : std::max(std::ilogb(magnitude), smallest);
  const double units = std::ldexp(magnitude, stored - exponent);
  const unsigned above = static_cast<unsigned>(exponent - smallest) << stored;
  return static_cast<std::uint16_t>(sign | (above + static_cast<unsigned>(units)));
}

double value_of(const Format& format, std::uint16_t code) {
  const int stored = format.precision - 1;
  const unsigned mask = (1u << format.exponent_bits) - 1u;
  const unsigned exponent = (code >> stored) & mask;
  const unsigned significand = code & ((1u << stored) - 1u);
  const double sign = (code & 0x8000u) != 0 ? -1.0 : 1.0;
  if (exponent == mask) {
    const double special =
        significand != 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
    return std::copysign(special, sign);
  }
  const int smallest = 2 - (1 << (format.exponent_bits - 1));
  const double whole = exponent == 0 ? significand : significand + (1u << stored);
  const int power = (exponent == 0 ? 0 : static_cast<int>(exponent) - 1) + smallest - stored;
  return sign * std::ldexp(whole, power);
}

template <typename Number>
void put(double value, std::byte* bytes) {
  const auto number = static_cast<Number>(value);
  std::memcpy(bytes, &number, sizeof number);
}

template <typename Number>
double get(const std::byte* bytes) {
  Number number;
  std::memcpy(&number, bytes, sizeof number);
  return static_cast<double>(number);
}

}  // namespace

const char* name_of(Type type) {
  return named(type).name;
}

Type type_of(const char* name) {
  for (const Named& entry : kTypes) {
    if (std::strcmp(entry.name, name) == 0) {
      return entry.type;
    }
  }
  throw ConfigError(std::string("type '") + name +
                    "' is unknown; expected float32, float16, bfloat16, float64, " + "int32, int64 or uint8");
}

Index bytes_of(Type type) {
  return named(type).bytes;
}

bool is_float(Type type) {
  return type == Type::float32 || type == Type::float16 || type == Type::bfloat16 || type == Type::float64;
}

double Format::unit_roundoff() const {
  return std::ldexp(1.0, -precision);
}

double Format::smallest_normal() const {
  return std::ldexp(1.0, 2 - (1 << (exponent_bits - 1)));
}

double Format::smallest_subnormal() const {
  return std::ldexp(1.0, 3 - (1 << (exponent_bits - 1)) - precision);
}

double Format::largest() const {
  return std::ldexp(2.0 - std::ldexp(1.0, 1 - precision), (1 << (exponent_bits - 1)) - 1);
}

Format format_of(Type type) {
  HAE_EXPECTS(is_float(type));
  switch (type) {
    case Type::float16:
      return {11, 5};
    case Type::bfloat16:
      return {8, 8};
    case Type::float64:
      return {53, 11};
    default:
      return {24, 8};
  }
}

double rounded(Type type, double value) {
  if (!is_float(type)) {
    return std::nearbyint(value);
  }
  if (type == Type::float64 || value == 0 || !std::isfinite(value)) {
    return value;
  }
  const Format format = format_of(type);
  const int smallest = 2 - (1 << (format.exponent_bits - 1));
  const int last_place = std::max(std::ilogb(value), smallest) - (format.precision - 1);
  // Both scalings are exact, because every format here is much narrower than double.
  const double nearest = std::ldexp(std::nearbyint(std::ldexp(value, -last_place)), last_place);
  return std::fabs(nearest) > format.largest() ? std::copysign(std::numeric_limits<double>::infinity(), value)
                                               : nearest;
}

void store(Type type, double value, std::byte* bytes) {
  switch (type) {
    case Type::float32:
      return put<float>(value, bytes);
    case Type::float64:
      return put<double>(value, bytes);
    case Type::int32:
      return put<std::int32_t>(value, bytes);
    case Type::int64:
      return put<std::int64_t>(value, bytes);
    case Type::uint8:
      return put<std::uint8_t>(value, bytes);
    default: {
      const std::uint16_t code = code_of(format_of(type), value);
      std::memcpy(bytes, &code, sizeof code);
    }
  }
}

double load(Type type, const std::byte* bytes) {
  switch (type) {
    case Type::float32:
      return get<float>(bytes);
    case Type::float64:
      return get<double>(bytes);
    case Type::int32:
      return get<std::int32_t>(bytes);
    case Type::int64:
      return get<std::int64_t>(bytes);
    case Type::uint8:
      return get<std::uint8_t>(bytes);
    default: {
      std::uint16_t code;
      std::memcpy(&code, bytes, sizeof code);
      return value_of(format_of(type), code);
    }
  }
}

}  // namespace hae::validate
