#pragma once

#include <cstdint>

#include "cuda/memory.hpp"

namespace hae::device {

/// The bijection of 64-bit numbers that priorities are mixed by: the finaliser of splitmix64.
std::uint64_t mix(std::uint64_t x);

/// Fixed random priorities, of which the lowest goes first: priorities[lane, token] = mix(prefix ^ token).
///
/// prefixes    [lanes] mix(mix(mix(seed) ^ layer) ^ lane), lane 0 when the layer is the lane
/// priorities  [lanes, stride]
void draw_priorities(const std::uint64_t* prefixes, Index lanes, Index stride, std::uint64_t* priorities,
                     Stream stream);

}  // namespace hae::device
