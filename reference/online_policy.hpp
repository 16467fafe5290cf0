#pragma once

#include <functional>
#include <memory>

#include "reference/budgeted_policy.hpp"
#include "reference/shared_options.hpp"

namespace hae::reference {

/// How a policy that evicts in every step scores the tokens of one layer.
class OnlineScores {
 public:
  virtual ~OnlineScores() = default;

  /// Observes prompt rows, in order: those that the policy needs and perhaps more.
  virtual void prefill(const Rows& rows) = 0;

  /// Observes the row of a step, whose token has joined `cache`.
  virtual void step(const Rows& row, const LayerCache& cache) = 0;

  /// Of a resident; the lowest goes first.
  [[nodiscard]] virtual double score(Index lane, Index token) const = 0;
};

/// Brings every lane down to its budget after the prefill and after each step: the lowest scores among the
/// tokens that are neither sinks nor recent go. Such policies differ only in their scores and defaults.
class OnlinePolicy final : public BudgetedPolicy {
 public:
  struct Config {
    LaneKind lanes = LaneKind::layer;
    Needs needs;
    Index sinks = 0;
    RecentOfBudget recent;
    Index less_recent_in_fit = 0;  ///< the fit protects that many fewer than a step does
    std::function<std::unique_ptr<OnlineScores>(const SequenceInfo& info, Index layer)> scores;
  };

  OnlinePolicy(Options options, Config config, Rebuild rebuild);

  [[nodiscard]] LaneKind lanes() const override { return config_.lanes; }
  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override {
    return config_.needs;
  }
  [[nodiscard]] std::unique_ptr<Run> start(const SequenceInfo& info) const override;
  [[nodiscard]] std::optional<Limits> limits_under(const SequenceInfo& /*info*/, Index /*layer*/,
                                                   Index budget) const override {
    return limits(budget);
  }

  [[nodiscard]] const Config& config() const { return config_; }

  /// Limits while decoding under a budget; none if more tokens are protected than it holds.
  [[nodiscard]] std::optional<Limits> limits(Index budget) const;

  [[nodiscard]] Index fitted(const SequenceInfo& info) const { return budget()->of(info.prompt); }

 private:
  Config config_;
};

}  // namespace hae::reference
