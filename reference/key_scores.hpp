#pragma once

#include <memory>

#include "reference/prompt_selection.hpp"

namespace hae::reference {

/// A policy that scores the tokens of a prompt by the keys alone.
class KeySelection final : public PromptSelection {
 public:
  /// Scores of the keys [tokens, head_dim] of one KV head's prompt.
  using Score = std::vector<double> (*)(const View<const float, 2>& keys, Index tokens);

  KeySelection(Options options, Rebuild rebuild, Score score)
      : PromptSelection(std::move(options), rebuild, 0), score_(score) {}

  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override {
    return {.keys = true};
  }
  [[nodiscard]] std::unique_ptr<PromptScorer> scorer(const SequenceInfo& info,
                                                     const LayerVectors& vectors) const override;

 private:
  Score score_;
};

}  // namespace hae::reference
