#pragma once

#include <cstdint>

#include "sim/view.hpp"

namespace hae::reference {

/// The fixed priority of a token; the lowest goes first, so that the kept set is a uniform sample.
///
///   priority = mix(mix(mix(mix(seed) ^ layer) ^ lane) ^ token), lane 0 when the layer is the lane
///
/// mix is the finaliser of splitmix64. random_priority(1, 0, 0, 0) = 0xe28195ddd9ee4956.
std::uint64_t random_priority(std::uint64_t seed, Index layer, Index lane, Index token);

}  // namespace hae::reference
