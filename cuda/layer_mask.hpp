#pragma once

#include "sim/arithmetic.hpp"
#include "sim/trace.hpp"

namespace hae::device {

/// Which keys the queries of one layer of one sequence see, as a device evaluates it, key by key:
///
///   (j <= i and (W = 0 or i - j < W))
///   or (bidirectional and i, j are prompt tokens of one image [and |i - j| < W, where the window bounds it])
struct LayerMask {
  Index prompt = 0;
  Index window = 0;  ///< 0: none
  MaskRule::Bidirectional bidirectional = MaskRule::Bidirectional::none;
  const Index* image = nullptr;  ///< [T] device memory; -1 for text

  [[nodiscard]] HAE_HOST_DEVICE bool sees(Index query, Index key) const {
    const Index back = query - key;
    if (back >= 0 && (window == 0 || back < window)) {
      return true;
    }
    if (bidirectional == MaskRule::Bidirectional::none || query >= prompt || key >= prompt ||
        image[query] < 0 || image[query] != image[key]) {
      return false;
    }
    const Index distance = back < 0 ? -back : back;
    return bidirectional == MaskRule::Bidirectional::image || window == 0 || distance < window;
  }
};

}  // namespace hae::device
