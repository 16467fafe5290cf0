#include "reference/recycle_bin.hpp"

#include <algorithm>

namespace hae::reference {
namespace {

/// Fig. 1: mark one token a step, empty the bin when it is full.
class MarkingDecode final : public LayerDecode {
 public:
  MarkingDecode(CumulativeScores scores, const Limits& limits)
      : scores_(std::move(scores)), limits_(limits) {}

  Decision step(const Rows& row, const LayerCache& cache) override {
    scores_.observe(row);
    Decision decision;
    for (Index lane = 0; lane < cache.lanes(); ++lane) {
      if (cache.unmarked(lane) <= *limits_.budget) {
        continue;
      }
      const std::vector<Index> tokens = eligible(cache, lane, limits_.sinks, limits_.recent);
      const Index marked = scores_.lowest(lane, tokens, 1).front().token;
      decision.mark.push_back({lane, marked});
      std::vector<Index> bin(cache.pending(lane).begin(), cache.pending(lane).end());
      bin.push_back(marked);
      if (static_cast<Index>(bin.size()) == *limits_.bin) {
        for (const Index token : bin) {
          decision.evict.push_back({row.layer(), lane, token, scores_.score(lane, token)});
        }
      }
    }
    return decision;
  }

 private:
  CumulativeScores scores_;
  Limits limits_;
};

/// Def. 2: when l + D tokens are resident, the D lowest go.
class BatchDecode final : public LayerDecode {
 public:
  BatchDecode(CumulativeScores scores, const Limits& limits) : scores_(std::move(scores)), limits_(limits) {}

  Decision step(const Rows& row, const LayerCache& cache) override {
    scores_.observe(row);
    Decision decision;
    for (Index lane = 0; lane < cache.lanes(); ++lane) {
      if (cache.residents(lane) >= *limits_.budget + *limits_.bin) {
        scores_.evict_lowest(cache, row.layer(), lane, limits_, *limits_.bin, decision);
      }
    }
    return decision;
  }

 private:
  CumulativeScores scores_;
  Limits limits_;
};

class RecycleBinRule final : public DecodeRule {
 public:
  explicit RecycleBinRule(const RecycleBin& bin) : bin_(bin) {}

  [[nodiscard]] Limits limits(Index sinks, Index budget) const override {
    const Index capacity = bin_.capacity.of(budget);
    // Eq. (4) takes candidates from the set before the window of D new tokens.
    const Index recent =
        bin_.mode == RecycleBin::Mode::mark ? 1 : std::max<Index>(0, std::min(capacity, budget - sinks));
    return {sinks, bin_.recent.value_or(recent), budget, capacity, budget + capacity - 1};
  }

  [[nodiscard]] std::unique_ptr<LayerDecode> begin(CumulativeScores scores,
                                                   const Limits& limits) const override {
    if (bin_.mode == RecycleBin::Mode::mark) {
      return std::make_unique<MarkingDecode>(std::move(scores), limits);
    }
    return std::make_unique<BatchDecode>(std::move(scores), limits);
  }

  [[nodiscard]] LaneSizes sizes(const Limits& limits, Index residents, Index steps) const override {
    LaneSizes sizes;
    for (Index step = 0; step < steps; ++step) {
      ++residents;
      sizes.total += residents;
      sizes.peak = std::max(sizes.peak, residents);
      // Either mode empties the bin exactly when D tokens more than the budget are there.
      if (residents == *limits.budget + *limits.bin) {
        residents = *limits.budget;
      }
    }
    return sizes;
  }

 private:
  RecycleBin bin_;
};

}  // namespace

std::shared_ptr<const DecodeRule> make_recycle_bin_rule(const RecycleBin& bin) {
  return std::make_shared<RecycleBinRule>(bin);
}

}  // namespace hae::reference
