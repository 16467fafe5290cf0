#include "reference/budgeted_policy.hpp"

#include "reference/shared_options.hpp"

namespace hae::reference {

void warn_above_window(const SequenceInfo& info, Index layer, Index budget, Decision& decision) {
  const Index window = info.masks[at(layer)].window;
  if (window > 0 && budget > window) {
    decision.warnings.push_back("layer " + std::to_string(layer) + ": the budget of " +
                                std::to_string(budget) + " tokens exceeds the layer's window of " +
                                std::to_string(window) + "; what is older receives no attention");
  }
}

BudgetedPolicy::BudgetedPolicy(Options options, Rebuild rebuild)
    : options_(std::move(options)), rebuild_(rebuild), budget_(parse_budget(options_)) {}

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
