#include <array>

#include "reference/cumulative_scores.hpp"
#include "reference/online_policy.hpp"
#include "reference/policies.hpp"

namespace hae::reference {
namespace {

constexpr std::array kOptions = {kRequiredBudgetOption, kHalfRecentOption, kHeadLaneOption, kGroupOption};

class SummedRows final : public OnlineScores {
 public:
  SummedRows(const SequenceInfo& info, const Reduction& reduction) : sums_(info, {reduction}) {}

  void prefill(const Rows& rows) override { sums_.observe(rows); }
  void step(const Rows& row, const LayerCache& /*cache*/) override { sums_.observe(row); }
  [[nodiscard]] double score(Index lane, Index token) const override { return sums_.score(lane, token); }

 private:
  CumulativeScores sums_;
};

std::shared_ptr<const Policy> make(Options options) {
  const Reduction reduction = parse_head_reduction(options);
  OnlinePolicy::Config config;
  config.lanes = reduction.lanes;
  config.needs.prompt_rows = PromptRows::all;
  config.recent = parse_recent(options);
  config.less_recent_in_fit = 1;  // the first step's own token will be the k-th
  config.scores = [reduction](const SequenceInfo& info, Index) {
    return std::make_unique<SummedRows>(info, reduction);
  };
  return std::make_shared<OnlinePolicy>(std::move(options), std::move(config), make);
}

}  // namespace

const PolicyInfo kH2oFlexgen = {
    "h2o/flexgen",
    "H2O as FlexGen runs it: evicts the least attended token that is not among the newest k",
    "H2O, arXiv 2306.14048; the variant of the official h2o_flexgen (pytorch_backend.py)",
    "Online. Exact where budget = 2k - 1 with k = recent: the k largest prefill sums outside the newest k - "
    "1 stay, then each step adds its row, the new token's own share included, and evicts the lowest sum "
    "outside the newest k. Other budgets and other values of recent are our generalisation: the prefill "
    "protects one token fewer than a step. Heads of a group are averaged; the original has one KV head a "
    "query head. Ties go to the older token. Needs all prompt rows.",
    kOptions,
    make};

}  // namespace hae::reference
