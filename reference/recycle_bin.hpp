#pragma once

#include <memory>
#include <optional>

#include "reference/score_policy.hpp"

namespace hae::reference {

/// Dynamic Decoding Eviction Strategy (DDES), HAE Fig. 1, Def. 2 and Eq. (4)-(5), arXiv 2602.02197: tokens go
/// into a recycle bin of capacity D and leave the cache together.
struct RecycleBin {
  /// mark (Fig. 1): each step that leaves more than l unmarked residents marks the lowest-scored eligible
  /// one; D pending tokens are evicted at once. batch (Def. 2): l + D residents lose the D lowest eligible
  /// ones at once.
  enum class Mode { mark, batch } mode = Mode::mark;
  Amount capacity = Amount::of_tokens(1);  ///< D
  std::optional<Index> recent;             ///< none: the mode's default
};

std::shared_ptr<const DecodeRule> make_recycle_bin_rule(const RecycleBin& bin);

}  // namespace hae::reference
