#pragma once

#include <span>
#include <vector>

#include "sim/cache.hpp"

namespace hae::reference {

/// A token and its importance.
struct Scored {
  double score = 0;
  Index token = 0;
};

/// The one total order of evictions: the lower score first, among equal scores the older token. +0 and -0 are
/// equal; a NaN ranks below everything.
bool goes_before(const Scored& a, const Scored& b);

/// The `count` first tokens in the order of goes_before, in that order.
///
/// throws  ContractViolation if there are fewer
std::vector<Scored> select_lowest(std::vector<Scored> candidates, Index count);

/// Residents of a lane that a score may evict: not a sink, not among the newest `recent` residents, not
/// pending. Protected tokens leave the ranking; they never get a sentinel score. Ascending.
std::vector<Index> eligible(const LayerCache& cache, Index lane, Index sinks, Index recent);

}  // namespace hae::reference
