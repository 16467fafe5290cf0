#pragma once

#include <memory>
#include <span>
#include <vector>

#include "reference/budgeted_policy.hpp"
#include "reference/shared_options.hpp"

namespace hae::reference {

/// Scores of the tokens of one layer's prompt, in each lane.
class PromptScorer {
 public:
  virtual ~PromptScorer() = default;

  /// Prompt rows, in order.
  virtual void observe(const Rows& /*rows*/) {}

  /// [lanes][P] by position; what is no candidate may hold anything.
  [[nodiscard]] virtual std::vector<std::vector<double>> scores() const = 0;
};

/// A policy that scores the prompt once, at the end of each layer's prefill. In each KV head the tokens of
/// highest score stay, and the first `sinks` and the newest `window` whatever their score; decoding evicts
/// nothing.
class PromptSelection : public BudgetedPolicy {
 public:
  PromptSelection(Options options, Rebuild rebuild, Index window, Index sinks = 0)
      : BudgetedPolicy(std::move(options), rebuild), window_(window), sinks_(sinks) {}

  [[nodiscard]] LaneKind lanes() const override { return LaneKind::kv_head; }
  [[nodiscard]] std::unique_ptr<Run> start(const SequenceInfo& info) const override;
  [[nodiscard]] std::optional<Limits> limits_under(const SequenceInfo& info, Index layer,
                                                   Index budget) const override;

  /// Of a lane that keeps so many tokens of the prompt.
  [[nodiscard]] Limits limits_of(Index kept) const {
    return {.sinks = sinks_, .recent = window_, .budget = kept, .capacity = kept, .grows = true};
  }

  [[nodiscard]] Index window() const { return window_; }
  [[nodiscard]] Index sinks() const { return sinks_; }

  /// The budget of every layer.
  ///
  /// throws  ConfigError when sinks and window do not fit into it
  [[nodiscard]] Index fitted(const SequenceInfo& info) const;

  /// Scores of one layer, valid as long as the vectors are.
  [[nodiscard]] virtual std::unique_ptr<PromptScorer> scorer(const SequenceInfo& info,
                                                             const LayerVectors& vectors) const = 0;

  /// Whether a score may evict the token, the window apart.
  [[nodiscard]] virtual bool is_candidate(const SequenceInfo& /*info*/, Index /*token*/) const {
    return true;
  }

  /// Says of one lane's evictions, ascending by token, where they go: nowhere.
  virtual void merge(const LayerVectors& /*vectors*/, const LayerCache& /*cache*/, Index /*lane*/,
                     std::span<Evict> /*evicted*/) const {}

  /// Tokens that stay in a lane of the layer under a budget: of lanes that differ, their mean.
  [[nodiscard]] virtual Index kept(const SequenceInfo& info, Index layer, Index budget) const;

  /// [lanes] Tokens that stay.
  [[nodiscard]] virtual std::vector<Index> kept_by_lane(const SequenceInfo& info, Index layer, Index budget,
                                                        const std::vector<std::vector<double>>& scores) const;

 private:
  Index window_;
  Index sinks_;
};

/// `window` of an option table.
constexpr OptionInfo window_option(std::string_view default_value) {
  return {"window", default_value, "a count of 1 or more", "w: the last prompt tokens, which stay"};
}

}  // namespace hae::reference
