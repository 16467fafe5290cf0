#include <algorithm>
#include <cmath>
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

class Adakv final : public PromptSelection {
 public:
  Adakv(Options options, Rebuild rebuild, const SnapkvScores& scores)
      : PromptSelection(std::move(options), rebuild, scores.window),
        scores_(scores),
        floor_(given().threshold("floor")) {
    if (floor_ > 1.0) {
      given().fail("floor");
    }
  }

  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override {
    return {.newest_prompt_rows = scores_.window};
  }
  [[nodiscard]] std::unique_ptr<PromptScorer> scorer(const SequenceInfo& info,
                                                     const LayerVectors& /*vectors*/) const override {
    return scores_.scorer(info);
  }

  /// c_h of the H·B largest scores lie in head h; n_h = round(c_h (1 - f) + ⌊B f⌋), half to even.
  [[nodiscard]] std::vector<Index> kept_by_lane(const SequenceInfo& info, Index layer, Index budget,
                                                const TokenScores& scores) const override {
    const Index middle = budget - window();
    const Index candidates = info.prompt - window();
    if (middle > candidates) {
      return PromptSelection::kept_by_lane(info, layer, budget, scores);
    }
    const double floor = std::floor(static_cast<double>(middle) * floor_);
    std::vector<Index> kept;
    for (const Index count : largest_by_lane(scores, candidates, info.kv_heads * middle)) {
      const double share = static_cast<double>(count) * (1.0 - floor_) + floor;
      kept.push_back(window() + std::min(candidates, static_cast<Index>(std::nearbyint(share))));
    }
    return kept;
  }

 private:
  SnapkvScores scores_;
  double floor_;
};

constexpr auto kOptions = concatenate(
    std::array{OptionInfo{"budget", "-", "a count of 1 or more, or a share (0.15 or 15%) of the prompt",
                          "cap: mean residents of a KV head; required, unless it is matched"},
               window_option("32")},
    pooling_options("7", "max"),
    std::array{
        OptionInfo{"floor", "0.2", "a number from 0 to 1", "f: share of the budget that every head has"}});

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
    "how "
    "much each head keeps, above a floor; groups are reduced before pooling. Rounding may give a layer some "
    "tokens more or less than H·B, as in the original; a matched budget matches H·B. Its option to weigh "
    "heads "
    "and its skipped layers are left out. Needs the last w prompt rows.",
    kOptions,
    make};

}  // namespace hae::reference
