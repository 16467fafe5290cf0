#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <utility>

#include "sim/errors.hpp"
#include "sim/weights.hpp"

// Words of the Python interface that stand for one of a few values.

namespace hae::python {

template <typename Value>
using Choices = std::initializer_list<std::pair<const char*, Value>>;

/// The value of a word. throws  ConfigError: `WHAT is 'WORD'; allowed: ...`, in the order of the choices
template <typename Value>
Value choose(const std::string& word, Choices<Value> choices, const std::string& what) {
  const auto* const found =
      std::ranges::find_if(choices, [&](const auto& choice) { return word == choice.first; });
  if (found != choices.end()) {
    return found->second;
  }
  std::string allowed;
  for (const auto& [name, value] : choices) {
    allowed += (allowed.empty() ? "" : ", ") + std::string(name);
  }
  throw ConfigError(what + " is '" + word + "'; allowed: " + allowed);
}

inline NanRule nan_rule(const std::string& word) {
  return choose<NanRule>(word, {{"error", NanRule::error}, {"lowest", NanRule::lowest}}, "nan");
}

}  // namespace hae::python
