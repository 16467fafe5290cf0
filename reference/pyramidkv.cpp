#include <algorithm>

#include "reference/policies.hpp"
#include "reference/snapkv_scores.hpp"

namespace hae::reference {
namespace {

/// Tokens beside the window that layer l keeps, of `layers`.
///
///   b = cap - w, least = ⌊b/β⌋, most = 2b - least; if most ≥ N - w: most = N - w, least = 2b - most
///   b_l = most - l ⌊(most - least)/(L - 1)⌋;  for N < 2b, and for one layer: b
Index pyramid(Index b, Index beta, Index layer, Index layers, Index tokens, Index window) {
  if (tokens < 2 * b || layers == 1) {
    return b;
  }
  Index least = b / beta;
  Index most = 2 * b - least;
  if (most >= tokens - window) {
    most = tokens - window;
    least = 2 * b - most;
  }
  return most - layer * ((most - least) / (layers - 1));
}

class Pyramidkv final : public SnapkvSelection {
 public:
  Pyramidkv(Options options, Rebuild rebuild, const SnapkvScores& scores)
      : SnapkvSelection(std::move(options), rebuild, scores), beta_(given().count("beta", 1)) {}

  [[nodiscard]] Index kept(const SequenceInfo& info, Index layer, Index budget) const override {
    if (info.prompt < budget) {
      return info.prompt;
    }
    return std::min(info.prompt,
                    window() + pyramid(budget - window(), beta_, layer, info.layers, info.prompt, window()));
  }

 private:
  Index beta_;
};

constexpr auto kOptions = concatenate(
    std::array{OptionInfo{"budget", "-", "a count of 1 or more, or a share (0.15 or 15%) of the prompt",
                          "cap: mean residents of a layer; required, unless it is matched"},
               window_option("8")},
    pooling_options("5", "mean"),
    std::array{
        OptionInfo{"beta", "20", "a count of 1 or more", "β: the last layer keeps about 1/β of the mean"}});

std::shared_ptr<const Policy> make(Options options) {
  const SnapkvScores scores = parse_snapkv_scores(options);
  return std::make_shared<Pyramidkv>(std::move(options), make, scores);
}

}  // namespace

const PolicyInfo kPyramidkv = {
    "pyramidkv",
    "SnapKV with larger budgets in lower layers",
    "PyramidKV, arXiv 2406.02069; Zefan-Cai/PyramidKV pyramidkv_utils.py",
    "Prefill only: decoding evicts nothing. Exact: budgets fall from layer to layer by a whole number of "
    "tokens. That rounding gives more than the promised layers x budget, by up to 15 % for small ones: "
    "compare its tokens and bytes, or match them. A budget above N/2 + w is the same for all layers, and one "
    "above N evicts nothing. Needs the last w prompt rows.",
    kOptions,
    make};

}  // namespace hae::reference
