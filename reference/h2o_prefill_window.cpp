#include "reference/policies.hpp"
#include "reference/snapkv_scores.hpp"

namespace hae::reference {
namespace {

class H2oPrefillWindow final : public PromptSelection {
 public:
  H2oPrefillWindow(Options options, Rebuild rebuild, Index window)
      : PromptSelection(std::move(options), rebuild, window), group_(parse_group(given())) {}

  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override {
    return {PromptRows::all};
  }
  [[nodiscard]] std::unique_ptr<PromptScorer> scorer(const SequenceInfo& info,
                                                     const LayerVectors& /*vectors*/) const override {
    return SnapkvScores{.window = info.prompt, .group = group_}.scorer(info);  // of all rows, nothing pooled
  }

 private:
  HeadReduction group_;
};

constexpr std::array kOptions = {
    kRequiredBudgetOption, window_option("8"),
    OptionInfo{"group", "mean", "mean, max or sum", "how the query heads of a KV head become one"}};

std::shared_ptr<const Policy> make(Options options) {
  const Index window = options.count("window", 1);
  return std::make_shared<H2oPrefillWindow>(std::move(options), make, window);
}

}  // namespace

const PolicyInfo kH2oPrefillWindow = {
    "h2o/prefill-window",
    "keeps what all prompt rows look at, and the last tokens",
    "H2O, arXiv 2306.14048, as Zefan-Cai/KVCache-Factory runs it: H2OKVCluster in pyramidkv_utils.py",
    "Prefill only: decoding evicts nothing, which H2O itself does. Exact: sums over all prompt rows by query "
    "head, then the group; the best budget - w and the last w stay. It is SnapKV with all rows and no "
    "pooling. Sums favour old tokens, which more rows can see. Needs all prompt rows.",
    kOptions,
    make};

}  // namespace hae::reference
