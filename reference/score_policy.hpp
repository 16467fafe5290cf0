#pragma once

#include <memory>
#include <optional>

#include "reference/budgeted_policy.hpp"
#include "reference/cumulative_scores.hpp"
#include "reference/dual_attention_pruning.hpp"

namespace hae::reference {

/// How a layer evicts while decoding, once its prefill was fitted to the budget l.
class DecodeRule {
 public:
  virtual ~DecodeRule() = default;

  /// Limits under a budget of l residents.
  [[nodiscard]] virtual Limits limits(Index sinks, Index budget) const = 0;

  /// Decode state that starts from the prefill's scores.
  [[nodiscard]] virtual std::unique_ptr<LayerDecode> begin(CumulativeScores scores,
                                                           const Limits& limits) const = 0;

  /// Sizes at attention time of a lane that starts with `residents` tokens.
  [[nodiscard]] virtual LaneSizes sizes(const Limits& limits, Index residents, Index steps) const = 0;
};

/// Evicts by cumulative attention after an optional pruning of the prompt: HAE, greedy eviction and H2O
/// differ only in their decode rule and their defaults.
class ScorePolicy final : public BudgetedPolicy {
 public:
  struct Config {
    std::optional<PruningOptions> pruning;
    std::shared_ptr<const DecodeRule> rule;  ///< none: nothing is evicted after the pruning
    ScoreOptions scores;
    Index sinks = 0;
    bool budget_is_required = false;  ///< else without one: a lane's size after the pruning
  };

  ScorePolicy(Options options, Config config, Rebuild rebuild);

  [[nodiscard]] LaneKind lanes() const override { return config_.scores.reduction.lanes; }
  [[nodiscard]] Needs needs(const SequenceInfo& info, Index layer) const override;
  [[nodiscard]] std::unique_ptr<Run> start(const SequenceInfo& info) const override;
  [[nodiscard]] bool prunes() const override { return config_.pruning.has_value(); }
  [[nodiscard]] bool budget_is_open() const override {
    return config_.rule != nullptr && BudgetedPolicy::budget_is_open();
  }
  [[nodiscard]] std::optional<Limits> limits_under(const SequenceInfo& info, Index layer,
                                                   Index budget) const override;
  [[nodiscard]] LaneSizes sizes_under(const Limits& limits, Index residents, Index steps) const override;

  [[nodiscard]] const Config& config() const { return config_; }

  /// l where a lane holds `residents` tokens after the pruning.
  [[nodiscard]] Index fitted(Index residents) const { return budget() ? budget()->of(residents) : residents; }

 private:
  Config config_;
};

}  // namespace hae::reference
