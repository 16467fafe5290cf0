#pragma once

#include <cstdint>

#include "sim/view.hpp"

namespace hae::testing {

/// Numbers that follow from a seed, the same on every machine (splitmix64; Steele, Lea, Flood 2014).
class Stream {
 public:
  explicit Stream(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15;
    std::uint64_t x = state_;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
  }

  /// In [0, bound).
  Index below(Index bound) { return static_cast<Index>(next() % static_cast<std::uint64_t>(bound)); }

  /// A multiple of 2^-24 in [0, 1).
  float unit() { return static_cast<float>(next() >> 40) * 0x1p-24f; }

  /// In [-1, 1).
  float signed_unit() { return 2.0f * unit() - 1.0f; }

 private:
  std::uint64_t state_;
};

}  // namespace hae::testing
