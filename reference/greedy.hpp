#pragma once

#include <memory>
#include <optional>

#include "reference/score_policy.hpp"

namespace hae::reference {

/// Greedy eviction, the paper's comparison (Corollary 2.1): after each decode step the lowest-scored eligible tokens go
/// until l are left.
///
/// recent  newest residents that are protected; none: half of l, at least 1
std::shared_ptr<const DecodeRule> make_greedy_rule(std::optional<Index> recent);

}  // namespace hae::reference
