#include "reference/cumulative_scores.hpp"

#include "sim/row_kernels.hpp"

namespace hae::reference {

CumulativeScores::CumulativeScores(const SequenceInfo& info, const ScoreOptions& options)
    : options_(options),
      sums_(static_cast<std::size_t>(lane_count(info, options.reduction.lanes)),
            std::vector<double>(static_cast<std::size_t>(kernels::padded(info.tokens)), 0.0)),
      exposures_(static_cast<std::size_t>(info.tokens), 0) {}

void CumulativeScores::observe(const Rows& rows) {
  for (Index r = 0; r < rows.rows(); ++r) {
    for (std::size_t lane = 0; lane < sums_.size(); ++lane) {
      const std::span<const double> values = rows.values(options_.reduction, static_cast<Index>(lane), r);
      kernels::add(values.data(), sums_[lane].data(), static_cast<Index>(values.size()));
    }
    if (options_.over == ScoreOptions::Over::mean) {
      for (const Range& range : rows.visible(r)) {
        for (Index j = range.begin; j < range.end; ++j) {
          ++exposures_[static_cast<std::size_t>(j)];
        }
      }
    }
  }
}

double CumulativeScores::score(Index lane, Index token) const {
  const double sum = sums_[static_cast<std::size_t>(lane)][static_cast<std::size_t>(token)];
  if (options_.over == ScoreOptions::Over::sum) {
    return sum;
  }
  return sum / static_cast<double>(exposures_[static_cast<std::size_t>(token)]);
}

void CumulativeScores::evict_lowest(const LayerCache& cache, Index layer, Index lane, const Limits& limits,
                                    Index count, Decision& decision) const {
  if (count <= 0) {
    return;
  }
  const std::vector<Index> tokens = eligible(cache, lane, limits.sinks, limits.recent);
  for (const Scored& lowest : this->lowest(lane, tokens, count)) {
    decision.evict.push_back({layer, lane, lowest.token, lowest.score});
  }
}

std::vector<Scored> CumulativeScores::lowest(Index lane, const std::vector<Index>& tokens,
                                             Index count) const {
  std::vector<Scored> scored;
  scored.reserve(tokens.size());
  for (const Index token : tokens) {
    scored.push_back({score(lane, token), token});
  }
  return select_lowest(std::move(scored), count);
}

}  // namespace hae::reference
