#pragma once

#include <array>
#include <charconv>
#include <cmath>
#include <concepts>
#include <string>

namespace hae {

/// A number as the shortest decimal that reads back equal; NaN, +infinity and -infinity in these words. The
/// sign of a NaN differs between machines, and is not said.
template <typename Number>
std::string shortest(Number number) {
  if constexpr (std::floating_point<Number>) {
    if (std::isnan(number)) {
      return "NaN";
    }
    if (std::isinf(number)) {
      return number > 0 ? "+infinity" : "-infinity";
    }
  }
  std::array<char, 64> buffer;
  return {buffer.data(), std::to_chars(buffer.data(), buffer.data() + buffer.size(), number).ptr};
}

}  // namespace hae
