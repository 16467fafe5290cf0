#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reference/options.hpp"
#include "sim/policy.hpp"

namespace hae::reference {

/// A budget in one layer.
struct LayerBudget {
  Index tokens = 0;
  std::optional<std::string> warning;  ///< says that it exceeds the layer's window
};

/// A budget that was written as a count or a share, in a layer whose lanes hold `residents` tokens. It is
/// taken as written also where a window of W tokens is smaller, with a warning: what is older receives no
/// attention.
LayerBudget layer_budget(const SequenceInfo& info, Index layer, const Amount& budget, Index residents);

/// What every policy with options is: its spec, and a `budget` that a count may replace where it has one and
/// was given none.
class BudgetedPolicy : public Policy {
 public:
  /// Makes the same policy from options in which a budget was resolved.
  using Rebuild = std::shared_ptr<const Policy> (*)(Options);

  BudgetedPolicy(Options options, Rebuild rebuild);

  [[nodiscard]] std::string spec() const override { return options_.canonical(); }
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> options() const override {
    return options_.all();
  }
  [[nodiscard]] bool budget_is_open() const override;
  [[nodiscard]] std::shared_ptr<const Policy> with_budget(Index budget) const override;

 protected:
  [[nodiscard]] const Options& given() const { return options_; }

  /// The budget; none where the option says `prompt`, or was left out and has no default.
  [[nodiscard]] const std::optional<Amount>& budget() const { return budget_; }

  /// throws  ConfigError when there is no budget
  void require_budget() const;

  /// layer_budget() of the budget, which must be there.
  [[nodiscard]] LayerBudget budget_in(const SequenceInfo& info, Index layer, Index residents) const {
    return layer_budget(info, layer, budget_.value(), residents);
  }

 private:
  Options options_;
  Rebuild rebuild_;
  std::optional<Amount> budget_;
};

}  // namespace hae::reference
