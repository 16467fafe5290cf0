#include <array>

#include "reference/greedy.hpp"
#include "reference/policies.hpp"
#include "reference/shared_options.hpp"

namespace hae::reference {
namespace {

constexpr std::array kOptions = {kRequiredBudgetOption, kHalfRecentOption, kHeadLaneOption, kGroupOption};

std::shared_ptr<const Policy> make(Options options) {
  ScorePolicy::Config config;
  config.scores.reduction = parse_head_reduction(options);
  config.budget_is_required = true;
  config.rule = make_greedy_rule(parse_recent(options));
  return std::make_shared<ScorePolicy>(std::move(options), std::move(config), make);
}

}  // namespace

const PolicyInfo kH2oLayerwise = {
    "h2o/layerwise",
    "H2O: half the budget for the heaviest hitters, half for the newest tokens",
    "H2O, arXiv 2306.14048; the variant of the official H2OKVCache_LayerWise (row sums added after each "
    "forward)",
    "Online. Exact for one sequence: after each forward the N - R tokens of largest cumulative attention "
    "outside the newest R stay, and a dropped token's score is forgotten. It evicts what "
    "greedy:budget=N,recent=R,lane=kv_head does. The original sums a batch; here each sequence is on its "
    "own. Ties go to the older token. Needs all prompt rows.",
    kOptions,
    make};

}  // namespace hae::reference
