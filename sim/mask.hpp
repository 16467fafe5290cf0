#pragma once

#include <span>
#include <vector>

#include "sim/trace.hpp"

namespace hae {

/// Which keys each query of one layer sees. For query i and key j:
///
///   (j <= i and (W = 0 or i - j < W))
///   or (bidirectional and i, j are prompt tokens of one image [and |i - j| < W, where the window bounds it])
class Mask {
 public:
  Mask(const SequenceInfo& info, Index layer);

  /// Keys that `query` sees, as ascending, disjoint, non-empty ranges; written to `out`.
  void visible(Index query, std::vector<Range>& out) const;

 private:
  [[nodiscard]] std::span<const Range> image_ranges(Index query) const;

  MaskRule rule_;
  std::vector<Index> picture_;              ///< [P] index into ranges_, -1 for text
  std::vector<std::vector<Range>> ranges_;  ///< prompt positions of each picture
};

}  // namespace hae
