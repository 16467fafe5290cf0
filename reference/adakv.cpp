#include <algorithm>
#include <tuple>

#include "reference/policies.hpp"
#include "reference/snapkv_scores.hpp"

namespace hae::reference {
namespace {

/// A token of some lane.
struct LaneScore {
  double score;
  Index token;
  std::size_t lane;
};

bool goes_before(const LaneScore& a, const LaneScore& b) {
  return std::tie(a.score, a.token, a.lane) < std::tie(b.score, b.token, b.lane);
}

/// [lanes] How many of the `count` largest scores of all lanes together lie in each. Among equal ones the
/// newer token counts as larger, then the higher lane.
std::vector<Index> largest_by_lane(const TokenScores& scores, Index candidates, Index count) {
  std::vector<LaneScore> all;
  for (std::size_t lane = 0; lane < scores.size(); ++lane) {
    for (Index j = 0; j < candidates; ++j) {
      all.push_back({scores[lane][at(j)], j, lane});
    }
  }
  std::ranges::sort(all, goes_before);
  std::vector<Index> counts(scores.size(), 0);
  const auto largest = std::min<Index>(count, std::ssize(all));
  std::for_each(all.end() - largest, all.end(), [&](const LaneScore& score) { ++counts[score.lane]; });
  return counts;
}

/// A share from 0 to 1.
Fraction parse_floor(const Options& options) {
  if (options.text("floor") == "0") {
    return {0, 1};
  }
  const Amount floor = options.amount("floor");
  if (floor.exceeds_whole() || (floor.tokens() && *floor.tokens() > 1)) {
    options.fail("floor");
  }
  return floor.share().value_or(Fraction{1, 1});
}

/// round(c (1 - f) + ⌊B f⌋), half to even, in whole numbers.
Index head_budget(Index count, Index budget, const Fraction& floor) {
  const Index least =
      static_cast<Index>(static_cast<WideIndex>(budget) * floor.numerator / floor.denominator);
  const WideIndex shared = static_cast<WideIndex>(count) * (floor.denominator - floor.numerator);
  const Index whole = least + static_cast<Index>(shared / floor.denominator);
  const WideIndex twice_the_rest = 2 * (shared % floor.denominator);
  const bool is_odd_half = twice_the_rest == floor.denominator && whole % 2 != 0;
  return whole + (twice_the_rest > floor.denominator || is_odd_half ? 1 : 0);
}

class Adakv final : public SnapkvSelection {
 public:
  Adakv(Options options, Rebuild rebuild, const SnapkvScores& scores)
      : SnapkvSelection(std::move(options), rebuild, scores), floor_(parse_floor(given())) {}

  /// c_h of the H·B largest scores lie in head h: it keeps head_budget(c_h) and the window.
  [[nodiscard]] std::vector<Index> kept_by_lane(const SequenceInfo& info, Index layer, Index budget,
                                                const TokenScores& scores) const override {
    const Index middle = budget - window();
    const Index candidates = info.prompt - window();
    if (middle > candidates) {
      return PromptSelection::kept_by_lane(info, layer, budget, scores);
    }
    std::vector<Index> kept;
    for (const Index count : largest_by_lane(scores, candidates, info.kv_heads * middle)) {
      kept.push_back(window() + std::min(candidates, head_budget(count, middle, floor_)));
    }
    return kept;
  }

 private:
  Fraction floor_;
};

constexpr auto kOptions = concatenate(
    std::array{OptionInfo{"budget", "-", "a count of 1 or more, or a share (0.15 or 15%) of the prompt",
                          "cap: mean residents of a KV head; required, unless it is matched"},
               window_option("32")},
    pooling_options("7", "max"),
    std::array{
        OptionInfo{"floor", "0.2", "a share from 0 to 1", "f: share of the budget that every head has"}});

std::shared_ptr<const Policy> make(Options options) {
  SnapkvScores scores = parse_snapkv_scores(options);
  scores.is_mean = true;
  scores.pools_groups = true;
  return std::make_shared<Adakv>(std::move(options), make, scores);
}

}  // namespace

const PolicyInfo kAdakv = {
    "adakv",
    "SnapKV with budgets that heads share: heads that look at much keep more",
    "Ada-KV, arXiv 2407.11550; FFY0/AdaKV adaptive_snapkv snapkv_utils.py",
    "Prefill only: decoding evicts nothing. Exact: the H·B largest scores of a layer's KV heads together say "
    "how much each head keeps, above a floor; groups are reduced before pooling. Rounding may give a layer "
    "some tokens more or less than H·B, as in the original; a matched budget matches H·B. Its option to "
    "weigh heads and its skipped layers are left out. Needs the last w prompt rows.",
    kOptions,
    make};

}  // namespace hae::reference
