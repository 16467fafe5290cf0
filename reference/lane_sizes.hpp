#pragma once

#include <algorithm>

#include "sim/policy.hpp"

namespace hae::reference {

/// Sizes at attention time of a lane that starts with `residents` tokens and is brought down to `budget`
/// after its prefill and after each step.
inline LaneSizes sizes_at_budget(Index budget, Index residents, Index steps) {
  LaneSizes sizes;
  residents = std::min(residents, budget);
  for (Index step = 0; step < steps; ++step) {
    ++residents;
    sizes.total += residents;
    sizes.peak = std::max(sizes.peak, residents);
    residents = std::min(residents, budget);
  }
  return sizes;
}

/// Sizes at attention time of a lane that starts with `residents` tokens and keeps every token of decoding.
inline LaneSizes sizes_that_grow(Index residents, Index steps) {
  return {residents * steps + steps * (steps + 1) / 2, steps > 0 ? residents + steps : 0};
}

}  // namespace hae::reference
