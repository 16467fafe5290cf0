#include "reference/selection.hpp"

#include <algorithm>
#include <cmath>

#include "sim/errors.hpp"

namespace hae::reference {

bool goes_before(const Scored& a, const Scored& b) {
  if (std::isnan(a.score) != std::isnan(b.score)) {
    return std::isnan(a.score);
  }
  if (a.score < b.score || b.score < a.score) {
    return a.score < b.score;
  }
  return a.token < b.token;
}

std::vector<Scored> select_lowest(std::vector<Scored> candidates, Index count) {
  HAE_EXPECTS(count >= 0 && count <= static_cast<Index>(candidates.size()));
  std::partial_sort(candidates.begin(), candidates.begin() + count, candidates.end(), goes_before);
  candidates.resize(static_cast<std::size_t>(count));
  return candidates;
}

std::vector<Index> eligible(const LayerCache& cache, Index lane, Index sinks, Index recent) {
  std::vector<Index> tokens;
  const Index end = cache.recent_begin(lane, recent);
  for (Index token = sinks; token < end; ++token) {
    if (cache.is_resident(lane, token) && !cache.is_pending(lane, token)) {
      tokens.push_back(token);
    }
  }
  return tokens;
}

}  // namespace hae::reference
