#pragma once

#include <array>
#include <charconv>
#include <string>

namespace hae {

/// A number as the shortest decimal that reads back equal.
template <typename Number>
std::string shortest(Number number) {
  std::array<char, 64> buffer;
  return {buffer.data(), std::to_chars(buffer.data(), buffer.data() + buffer.size(), number).ptr};
}

}  // namespace hae
