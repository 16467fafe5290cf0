#pragma once

#include <concepts>
#include <span>
#include <string>
#include <string_view>

#include "sim/errors.hpp"
#include "sim/text.hpp"
#include "sim/view.hpp"

// How this folder words its errors: `FILE:/dataset: what was found, what was expected; what to do`, in one
// line.

namespace hae::traces {

inline std::string text(std::string_view words) {
  return std::string(words);
}

template <std::integral Integer>
std::string text(Integer number) {
  return std::to_string(number);
}

template <std::floating_point Real>
std::string text(Real number) {
  return shortest(number);
}

/// `[2, 3, 4]`.
inline std::string text(std::span<const Index> shape) {
  std::string words = "[";
  for (const Index extent : shape) {
    words += (words.size() > 1 ? ", " : "") + std::to_string(extent);
  }
  return words + "]";
}

template <typename... Parts>
std::string message(const Parts&... parts) {
  return (text(parts) + ...);
}

/// Throws a TraceError that says the parts one after another.
template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw TraceError(message(parts...));
}

/// Throws an OutputError that says the parts one after another.
template <typename... Parts>
[[noreturn]] void cannot_write(const Parts&... parts) {
  throw OutputError(message(parts...));
}

/// A file's own words in a message: what could break the line becomes a `?`, and 64 characters are enough.
inline std::string in_quotes(std::string_view words) {
  std::string safe = "'";
  for (const char letter : words.substr(0, 64)) {
    safe += static_cast<unsigned char>(letter) < 0x20 || letter == 0x7F ? '?' : letter;
  }
  return safe + (words.size() > 64 ? "...'" : "'");
}

}  // namespace hae::traces
