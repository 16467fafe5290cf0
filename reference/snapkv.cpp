#include "reference/policies.hpp"
#include "reference/snapkv_scores.hpp"

namespace hae::reference {
namespace {

constexpr auto kOptions =
    concatenate(std::array{kRequiredBudgetOption, window_option("32")}, pooling_options("5", "mean"));

std::shared_ptr<const Policy> make(Options options) {
  const SnapkvScores scores = parse_snapkv_scores(options);
  return std::make_shared<SnapkvSelection>(std::move(options), make, scores);
}

constexpr std::array kKvpressOptions = {
    kRequiredBudgetOption, window_option("64"),
    OptionInfo{"kernel", "5", "an odd count", "neighbours that pooling makes one of; 1 pools nothing"}};

std::shared_ptr<const Policy> make_kvpress(Options options) {
  SnapkvScores scores;
  scores.window = options.count("window", 1);
  scores.kernel = options.count("kernel", 1);
  if (scores.kernel % 2 == 0) {
    options.fail("kernel");
  }
  scores.is_mean = true;
  return std::make_shared<SnapkvSelection>(std::move(options), make_kvpress, scores);
}

}  // namespace

const PolicyInfo kSnapkv = {
    "snapkv",
    "keeps what the last prompt rows look at, and their own tokens",
    "SnapKV, arXiv 2404.14469; FasterDecoding/SnapKV snapkv_utils.py",
    "Prefill only: decoding evicts nothing. Exact: sums over the last w rows, pooled with stride 1 over the "
    "tokens before them (mean: divisor kernel, zeros outside), the best budget - w and the last w stay; "
    "nothing goes when the prompt is shorter than the budget. The original has one KV head a query head; "
    "with groups, each query head is pooled and then the group reduced, which for pool=max is not the other "
    "order. Defaults are those of its model hook but for the budget (theirs: 2048). Needs the last w prompt "
    "rows.",
    kOptions,
    make};

const PolicyInfo kSnapkvKvpress = {
    "snapkv/kvpress",
    "SnapKV as kvpress computes it",
    "SnapKV, arXiv 2404.14469; NVIDIA/kvpress snapkv_press.py",
    "Prefill only: decoding evicts nothing. Exact but for ties and for rounding in float32: means over the "
    "last w rows, mean-pooled by query head, then the mean of the group. kvpress keeps the w newest by a "
    "sentinel score, here they leave the ranking. Its counts int(N (1 - ratio)) are a budget as a share "
    "here, an exact decimal. Needs the last w prompt rows.",
    kKvpressOptions,
    make_kvpress};

}  // namespace hae::reference
