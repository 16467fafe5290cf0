#pragma once

#include <cstdint>

#include "cuda/memory.hpp"

namespace hae::device {

/// Chooses tokens in many lanes at once. All arrays are device memory.
///
/// Score  double, or std::uint64_t for priorities that are drawn
template <typename Score>
struct LowestSelection {
  Index lanes = 0;
  Index stride = 0;                        ///< entries of a lane's row
  const Score* scores = nullptr;           ///< [lanes, stride]
  const std::uint8_t* eligible = nullptr;  ///< [lanes, stride] 1 where a token may be chosen
  const Index* counts = nullptr;           ///< [lanes] how many to choose
  Index most = 0;                          ///< at least every count
  Index* chosen = nullptr;  ///< [lanes, most] positions in the order of choice; -1 where there are no more
};

/// Bytes of work space for a selection of at most `most` tokens a lane.
Index select_lowest_bytes(Index lanes, Index stride, Index most);

/// The lowest tokens of each lane by the one total order of evictions: the lower score first, among equal
/// scores the older token. +0 and -0 are equal; a NaN ranks below everything. What is protected is not
/// eligible and leaves the ranking; it never gets a sentinel score. A lane with fewer eligible tokens than
/// its count gives all of them.
///
/// One token a lane is a minimum; more are a sort with an explicit comparator.
///
/// workspace  select_lowest_bytes(lanes, stride, most)
template <typename Score>
void select_lowest(const LowestSelection<Score>& selection, void* workspace, Stream stream);

extern template void select_lowest(const LowestSelection<double>&, void*, Stream);
extern template void select_lowest(const LowestSelection<std::uint64_t>&, void*, Stream);

}  // namespace hae::device
