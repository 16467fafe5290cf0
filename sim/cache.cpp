#include "sim/cache.hpp"

#include <algorithm>

#include "sim/row_kernels.hpp"
#include "sim/trace.hpp"

namespace hae {

Index lane_count(const SequenceInfo& info, LaneKind kind) {
  return kind == LaneKind::layer ? 1 : info.kv_heads;
}

LayerCache::LayerCache(const SequenceInfo& info, LaneKind kind)
    : kind_(kind), lanes_(static_cast<std::size_t>(lane_count(info, kind))) {
  for (Lane& lane : lanes_) {
    lane.keep.assign(static_cast<std::size_t>(kernels::padded(info.tokens)), 0.0f);
    lane.pending_since.assign(static_cast<std::size_t>(info.tokens), -1);
  }
}

std::vector<std::span<const float>> LayerCache::keep_by_lane() const {
  std::vector<std::span<const float>> all;
  for (const Lane& lane : lanes_) {
    all.emplace_back(lane.keep);
  }
  return all;
}

Index LayerCache::recent_begin(Index lane, Index recent) const {
  Index begin = joined_;
  for (Index found = 0; found < recent && begin > 0;) {
    --begin;
    found += is_resident(lane, begin) ? 1 : 0;
  }
  return begin;
}

bool LayerCache::same_residents(const LayerCache& other) const {
  if (kind_ != other.kind_ || joined_ != other.joined_ || lanes_.size() != other.lanes_.size()) {
    return false;
  }
  for (Index lane = 0; lane < lanes(); ++lane) {
    if (residents(lane) != other.residents(lane)) {
      return false;
    }
  }
  for (Index lane = 0; lane < lanes(); ++lane) {
    if (!std::ranges::equal(keep(lane), other.keep(lane))) {
      return false;
    }
  }
  return true;
}

void LayerCache::join(Index token) {
  HAE_EXPECTS(token == joined_);
  ++joined_;
  for (Lane& lane : lanes_) {
    lane.keep[offset(token)] = 1.0f;
    ++lane.residents;
  }
}

void LayerCache::skip(Index token) {
  HAE_EXPECTS(token == joined_);
  ++joined_;
}

void LayerCache::evict(Index lane, Index token) {
  HAE_EXPECTS(is_resident(lane, token));
  Lane& cache = at(lane);
  cache.keep[offset(token)] = 0.0f;
  cache.pending_since[offset(token)] = -1;
  std::erase(cache.pending, token);
  --cache.residents;
}

void LayerCache::mark(Index lane, Index token, Index step) {
  HAE_EXPECTS(is_resident(lane, token) && !is_pending(lane, token));
  at(lane).pending_since[offset(token)] = step;
  at(lane).pending.push_back(token);
}

}  // namespace hae
