#include "reference/head_sums.hpp"
#include "reference/policies.hpp"
#include "reference/prompt_selection.hpp"

namespace hae::reference {
namespace {

class Scorer final : public PromptScorer {
 public:
  explicit Scorer(const SequenceInfo& info) : info_(info), sums_(info, info.prompt) {}

  void observe(const Rows& rows) override { sums_.observe(rows); }

  /// S_h[j] = (Σ_i a_h[i, j]) / (P - j), then the mean of the group.
  [[nodiscard]] TokenScores scores() const override {
    TokenScores by_head = sums_.sums();
    for (std::vector<double>& row : by_head) {
      for (Index j = 0; j < info_.prompt; ++j) {
        row[at(j)] /= static_cast<double>(info_.prompt - j);
      }
    }
    return reduce_groups(by_head, info_, HeadReduction::mean);
  }

 private:
  const SequenceInfo& info_;
  HeadSums sums_;
};

class H2oObservedMean final : public PromptSelection {
 public:
  H2oObservedMean(Options options, Rebuild rebuild) : PromptSelection(std::move(options), rebuild, 0) {}

  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override {
    return {PromptRows::all};
  }
  [[nodiscard]] std::unique_ptr<PromptScorer> scorer(const SequenceInfo& info,
                                                     const LayerVectors& /*vectors*/) const override {
    return std::make_unique<Scorer>(info);
  }
};

constexpr std::array kOptions = {kRequiredBudgetOption};

std::shared_ptr<const Policy> make(Options options) {
  return std::make_shared<H2oObservedMean>(std::move(options), make);
}

}  // namespace

const PolicyInfo kH2oObservedMean = {
    "h2o/observed-mean",
    "keeps what the prompt rows that could see it look at most",
    "H2O, arXiv 2306.14048, as NVIDIA/kvpress scores it: observed_attention_press.py",
    "Prefill only: decoding evicts nothing. Exact but for ties and rounding in float32: sums by query head, "
    "divided by the rows from the token on, then the mean of the group. No token is protected. The divisor "
    "counts rows as if no window hid them. kvpress's counts int(N (1 - ratio)) are a budget as a share here, "
    "an exact decimal. Needs all prompt rows.",
    kOptions,
    make};

}  // namespace hae::reference
