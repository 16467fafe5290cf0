#pragma once

#include <memory>

#include "reference/head_sums.hpp"
#include "reference/prompt_selection.hpp"

namespace hae::reference {

/// What the last prompt rows look at, pooled over neighbours (SnapKV, arXiv 2404.14469).
struct SnapkvScores {
  Index window = 0;  ///< w: the last prompt rows and tokens
  Index kernel = 1;
  Pool pool = Pool::mean;
  HeadReduction group = HeadReduction::mean;
  bool is_mean = false;       ///< the mean of the rows, else their sum
  bool pools_groups = false;  ///< pools a KV head's reduced heads, else each query head before

  /// S_h[j] = Σ_{i=P-w}^{P-1} a_h[i, j] for j < P - w, pooled with stride 1, reduced over a KV head's query
  /// heads. Pooling and reduction do not commute for a maximum.
  [[nodiscard]] std::unique_ptr<PromptScorer> scorer(const SequenceInfo& info) const;
};

/// A policy that decides by these scores.
class SnapkvSelection : public PromptSelection {
 public:
  SnapkvSelection(Options options, Rebuild rebuild, const SnapkvScores& scores)
      : PromptSelection(std::move(options), rebuild, scores.window), scores_(scores) {}

  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override {
    return {.newest_prompt_rows = scores_.window};
  }
  [[nodiscard]] std::unique_ptr<PromptScorer> scorer(const SequenceInfo& info,
                                                     const LayerVectors& /*vectors*/) const override {
    return scores_.scorer(info);
  }

 private:
  SnapkvScores scores_;
};

/// `kernel` and `pool` of an option table, and `group`.
constexpr auto pooling_options(std::string_view kernel, std::string_view pool) {
  return std::array{
      OptionInfo{"kernel", kernel, "an odd count", "neighbours that pooling makes one of; 1 pools nothing"},
      OptionInfo{"pool", pool, "mean or max", "how; a mean counts zeros beyond the ends"},
      OptionInfo{"group", "mean", "mean, max or sum", "how the query heads of a KV head become one"},
  };
}

/// `window`, `kernel`, `pool` and `group`.
SnapkvScores parse_snapkv_scores(const Options& options);

}  // namespace hae::reference
