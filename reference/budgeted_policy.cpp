#include "reference/budgeted_policy.hpp"

#include <algorithm>

#include "reference/lane_sizes.hpp"
#include "reference/shared_options.hpp"
#include "reference/sliding_window.hpp"

namespace hae::reference {

BudgetedPolicy::BudgetedPolicy(Options options, Rebuild rebuild)
    : options_(std::move(options)), rebuild_(rebuild), budget_(parse_budget(options_)) {}

std::unique_ptr<Run> BudgetedPolicy::begin(const SequenceInfo& info) const {
  return cap_at_windows(start(info), lanes(), info);
}

std::optional<LaneSizes> BudgetedPolicy::sizes(const SequenceInfo& info, Index layer, Index budget,
                                               Index residents) const {
  const std::optional<Limits> written = limits_under(info, layer, budget);
  if (!written) {
    return std::nullopt;
  }
  const Index window = info.masks[at(layer)].window;
  const auto capped = window > 0 ? capped_at_window(*written, *written->budget, 1, window) : std::nullopt;
  return capped ? BudgetedPolicy::sizes_under(*capped, residents, info.steps())
                : sizes_under(*written, residents, info.steps());
}

LaneSizes BudgetedPolicy::sizes_under(const Limits& limits, Index residents, Index steps) const {
  return limits.grows ? sizes_that_grow(std::min(residents, *limits.budget), steps)
                      : sizes_at_budget(*limits.budget, residents, steps);
}

bool BudgetedPolicy::budget_is_open() const {
  return options_.has("budget") && !options_.given("budget");
}

std::shared_ptr<const Policy> BudgetedPolicy::with_budget(Index budget) const {
  HAE_EXPECTS(budget_is_open());
  Options options = options_;
  options.resolve("budget", std::to_string(budget));
  return rebuild_(std::move(options));
}

void BudgetedPolicy::require_budget() const {
  if (!budget_) {
    options_.fail("budget",
                  "is required; give a count or a share, or match it to the first policy's with --match");
  }
}

}  // namespace hae::reference
