#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reference/options.hpp"
#include "sim/policy.hpp"

namespace hae::reference {

/// Warns that a layer's budget exceeds its sliding window, where it does: it is taken as written, and what is
/// older than the window receives no attention.
void warn_above_window(const SequenceInfo& info, Index layer, Index budget, Decision& decision);

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

 private:
  Options options_;
  Rebuild rebuild_;
  std::optional<Amount> budget_;
};

}  // namespace hae::reference
