#pragma once

#include <memory>

#include "reference/score_policy.hpp"
#include "reference/shared_options.hpp"

namespace hae::reference {

/// Greedy eviction, the paper's comparison (Corollary 2.1): after each decode step the lowest-scored eligible
/// tokens go until l are left.
std::shared_ptr<const DecodeRule> make_greedy_rule(RecentOfBudget recent);

}  // namespace hae::reference
