#pragma once

#include <memory>
#include <optional>

#include "reference/cumulative_scores.hpp"
#include "reference/dual_attention_pruning.hpp"
#include "reference/options.hpp"
#include "sim/policy.hpp"

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
class ScorePolicy final : public Policy {
 public:
  struct Config {
    std::optional<PruningOptions> pruning;
    std::shared_ptr<const DecodeRule> rule;  ///< none: nothing is evicted after the pruning
    ScoreOptions scores;
    Index sinks = 0;
    std::optional<Index> budget;      ///< none: a lane's size after the pruning
    bool budget_is_open = true;       ///< whether a matched budget may replace it
    bool budget_is_required = false;  ///< there is no default
  };

  /// rebuild: makes the same policy from options in which a budget was resolved.
  using Rebuild = std::shared_ptr<const Policy> (*)(Options);

  ScorePolicy(Options options, Config config, Rebuild rebuild);

  [[nodiscard]] std::string spec() const override { return options_.canonical(); }
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> options() const override {
    return options_.all();
  }
  [[nodiscard]] LaneKind lanes() const override { return config_.scores.reduction.lanes; }
  [[nodiscard]] Needs needs(const SequenceInfo& info, Index layer) const override;
  [[nodiscard]] std::unique_ptr<Run> begin(const SequenceInfo& info) const override;
  [[nodiscard]] bool prunes() const override { return config_.pruning.has_value(); }
  [[nodiscard]] bool budget_is_open() const override {
    return config_.rule != nullptr && config_.budget_is_open;
  }
  [[nodiscard]] std::shared_ptr<const Policy> with_budget(Index budget) const override;
  [[nodiscard]] std::optional<LaneSizes> sizes(Index budget, Index residents, Index steps) const override;

  [[nodiscard]] const Config& config() const { return config_; }

 private:
  Options options_;
  Config config_;
  Rebuild rebuild_;
};

}  // namespace hae::reference
