#pragma once

#include <cstdio>
#include <string>

#include "sim/trace.hpp"

// Private to this folder: names and sizes that reader and writer share.

namespace hae::traces {

/// `000042`: sequences and layers are numbered with six digits.
inline std::string six_digits(Index number) {
  char digits[24];
  std::snprintf(digits, sizeof digits, "%06lld", static_cast<long long>(number));
  return digits;
}

/// The most layers or sequences that six digits can name.
inline constexpr Index kMostNumbered = 1'000'000;

/// The most tokens of a sequence: a list with a number for each takes 128 MiB, and T * T fits 64 bits.
inline constexpr Index kMostTokens = Index{1} << 24;

/// The most heads and the largest head: a trace that declares more without storing them must not cost memory.
inline constexpr Index kMostHeads = Index{1} << 16;
inline constexpr Index kMostDimensions = Index{1} << 20;

/// Where the row of decode step `step` >= 1 begins: sum over t < step of (P + t).
inline Index decode_offset(Index prompt, Index step) {
  return (step - 1) * prompt + (step - 1) * step / 2;
}

/// The length of all decode rows of one query head.
inline Index decode_length(const SequenceInfo& info) {
  return decode_offset(info.prompt, info.steps() + 1);
}

}  // namespace hae::traces
