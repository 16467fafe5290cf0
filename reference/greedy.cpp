#include "reference/greedy.hpp"

#include <algorithm>

#include "reference/lane_sizes.hpp"
#include "reference/policies.hpp"
#include "reference/shared_options.hpp"

namespace hae::reference {
namespace {

class GreedyDecode final : public LayerDecode {
 public:
  GreedyDecode(CumulativeScores scores, const Limits& limits) : scores_(std::move(scores)), limits_(limits) {}

  Decision step(const Rows& row, const LayerCache& cache) override {
    scores_.observe(row);
    Decision decision;
    for (Index lane = 0; lane < cache.lanes(); ++lane) {
      const Index excess = cache.residents(lane) - *limits_.budget;
      scores_.evict_lowest(cache, row.layer(), lane, limits_, excess, decision);
    }
    return decision;
  }

 private:
  CumulativeScores scores_;
  Limits limits_;
};

class GreedyRule final : public DecodeRule {
 public:
  explicit GreedyRule(RecentOfBudget recent) : recent_(std::move(recent)) {}

  [[nodiscard]] Limits limits(Index sinks, Index budget) const override {
    return {sinks, recent_(budget), budget, std::nullopt, budget};
  }

  [[nodiscard]] std::unique_ptr<LayerDecode> begin(CumulativeScores scores,
                                                   const Limits& limits) const override {
    return std::make_unique<GreedyDecode>(std::move(scores), limits);
  }

  [[nodiscard]] LaneSizes sizes(const Limits& limits, Index residents, Index steps) const override {
    return sizes_at_budget(*limits.budget, residents, steps);
  }

 private:
  RecentOfBudget recent_;
};

constexpr auto kOptions = concatenate(pruning_options("none"),
                                      std::array{kBudgetOption, kSinksOption,
                                                 OptionInfo{"recent", "1", "a count of 0 or more",
                                                            "the newest residents, never evicted by score"}},
                                      kScoreOptions);

std::shared_ptr<const Policy> make(Options options) {
  ScorePolicy::Config config;
  config.pruning = parse_pruning(options);
  config.scores = parse_scores(options);
  config.sinks = options.count("sinks", 0);
  config.rule = make_greedy_rule([recent = options.count("recent", 0)](Index) { return recent; });
  return std::make_shared<ScorePolicy>(std::move(options), std::move(config), make);
}

}  // namespace

std::shared_ptr<const DecodeRule> make_greedy_rule(RecentOfBudget recent) {
  return std::make_shared<GreedyRule>(std::move(recent));
}

const PolicyInfo kGreedy = {"greedy",
                            "evicts the lowest cumulative attention after every step",
                            "HAE, arXiv 2602.02197, Corollary 2.1: the eviction that DDES is compared with",
                            "Online. The paper does not say which scores its greedy eviction uses; here they "
                            "are those of DDES, so that only the bin differs. Needs all prompt rows.",
                            kOptions,
                            make};

}  // namespace hae::reference
