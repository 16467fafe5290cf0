#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "validate/number.hpp"

namespace hae::validate {

/// Random numbers of a case: splitmix64, so that equal names and seeds give equal cases everywhere.
class Draw {
 public:
  /// One stream for each name (FNV-1a) and seed.
  Draw(std::string_view name, std::uint64_t seed) : state_(seed ^ 0xCBF29CE484222325u) {
    for (const char c : name) {
      state_ = (state_ ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
    }
  }

  std::uint64_t bits() {
    std::uint64_t x = state_ += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }

  /// In [0, 1), a multiple of 2^-24.
  double unit() { return static_cast<double>(bits() >> 40) * 0x1p-24; }

  /// In [low, high].
  Index integer(Index low, Index high) {
    return low + static_cast<Index>(bits() % static_cast<std::uint64_t>(high - low + 1));
  }

  /// In [-1, 1), each rounded to the type.
  std::vector<double> symmetric(Type type, Index count, double factor = 1) {
    std::vector<double> values(at(count));
    for (double& value : values) {
      value = rounded(type, factor * (2 * unit() - 1));
    }
    return values;
  }

  /// 0 .. count - 1 in a random order.
  std::vector<Index> permutation(Index count) {
    std::vector<Index> order(at(count));
    for (Index i = 0; i < count; ++i) {
      const Index j = integer(0, i);
      order[at(i)] = order[at(j)];
      order[at(j)] = i;
    }
    return order;
  }

 private:
  std::uint64_t state_;
};

}  // namespace hae::validate
