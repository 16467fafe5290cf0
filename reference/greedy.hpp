#pragma once

#include <functional>
#include <memory>

#include "reference/score_policy.hpp"

namespace hae::reference {

/// How many of the newest residents are protected under a budget.
using RecentOfBudget = std::function<Index(Index budget)>;

/// Greedy eviction, the paper's comparison (Corollary 2.1): after each decode step the lowest-scored eligible
/// tokens go until l are left.
std::shared_ptr<const DecodeRule> make_greedy_rule(RecentOfBudget recent);

}  // namespace hae::reference
