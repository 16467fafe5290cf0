#pragma once

#include <array>
#include <memory>

#include "reference/budgeted_policy.hpp"

namespace hae::reference {

inline constexpr std::array kWindowOptions = {
    OptionInfo{"sinks", "4", "a count of 0 or more", "positions 0 .. sinks-1 are never evicted"},
    OptionInfo{"recent", "-", "a count of 0 or more",
               "newest residents that stay; this or a budget, unless it is matched"},
    OptionInfo{"budget", "-",
               "a count of 1 or more and at least sinks, or a share (0.15 or 15%) of the prompt",
               "residents a lane holds: recent = budget - sinks"},
};

/// A policy that keeps the first tokens and the newest ones, from options that hold kWindowOptions.
std::shared_ptr<const BudgetedPolicy> make_window(Options options, BudgetedPolicy::Rebuild rebuild);

}  // namespace hae::reference
