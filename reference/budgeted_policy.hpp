#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reference/options.hpp"
#include "sim/policy.hpp"

namespace hae::reference {

/// What every policy with options is: its spec, and a `budget` that a count may replace where it has one and
/// was given none. Budgets are capped at the sliding windows of their layers (sliding_window.hpp).
class BudgetedPolicy : public Policy {
 public:
  /// Makes the same policy from options in which a budget was resolved.
  using Rebuild = std::shared_ptr<const Policy> (*)(Options);

  BudgetedPolicy(Options options, Rebuild rebuild);

  [[nodiscard]] std::string spec() const override { return options_.canonical(); }
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> options() const override {
    return options_.all();
  }
  [[nodiscard]] std::unique_ptr<Run> begin(const SequenceInfo& info) const final;
  [[nodiscard]] std::optional<LaneSizes> sizes(const SequenceInfo& info, Index layer, Index budget,
                                               Index residents) const final;
  [[nodiscard]] bool budget_is_open() const override;
  [[nodiscard]] std::shared_ptr<const Policy> with_budget(Index budget) const override;

 protected:
  /// Policy::begin, with budgets as they are written.
  [[nodiscard]] virtual std::unique_ptr<Run> start(const SequenceInfo& info) const = 0;

  /// A lane's limits under a budget as it is written (of lanes that differ: with their mean budget); none if
  /// it is impossible.
  [[nodiscard]] virtual std::optional<Limits> limits_under(const SequenceInfo& /*info*/, Index /*layer*/,
                                                           Index /*budget*/) const {
    return std::nullopt;
  }

  /// Policy::sizes under such limits: the lane is brought down to its budget after the prefill and after each
  /// step, or after the prefill only where they grow.
  [[nodiscard]] virtual LaneSizes sizes_under(const Limits& limits, Index residents, Index steps) const;

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
