#include "sim/arbiter.hpp"

#include <algorithm>
#include <cmath>
#include <string>

namespace hae {
void Arbiter::prefill(const Decision& decision, Moment moment, Index layer) {
  HAE_EXPECTS(decision.mark.empty());
  note(decision);
  for (const Evict& evict : decision.evict) {
    expect(evict.layer >= 0 && evict.layer < info_.layers, 0, evict, "names a layer that does not exist");
    expect(moment != Moment::fit || evict.layer == layer, 0, evict, "is fitted in a layer of another turn");
    if (evict.layer <= layer) {
      apply(0, evict, moment != Moment::prune);
      continue;
    }
    expect(evict.token >= 0 && evict.token < info_.prompt, 0, evict, "is not a prompt token");
    for (Index lane = 0; lane < lane_count(info_, run_.policy->lanes()); ++lane) {
      if (evict.lane == Evict::kEveryLane || evict.lane == lane) {
        check_sinks(0, evict, lane);
      }
    }
    if (decision.effect == Effect::after) {
      expect(!evict.merge, 0, evict, "is merged after a prefill that has not begun; merge it within");
      run_.after[at(evict.layer)].push_back(evict);
    } else {
      expect(evict.lane == Evict::kEveryLane, 0, evict, "acts within a prefill on a single lane");
      remove_within(evict);
    }
  }
  note_merges(decision, layer);
  recent_begin_.clear();
}

/// Writes down what a decision merged, for those who form the rows of the layers.
///
/// layer  the last one whose prefill has begun
void Arbiter::note_merges(const Decision& decision, Index layer) {
  std::vector<std::vector<Evict>> merged(run_.merged.size());
  for (const Evict& evict : decision.evict) {
    if (evict.merge) {
      check_merge(evict, layer);
      merged[at(evict.layer)].push_back(evict);
    }
  }
  for (std::size_t l = 0; l < merged.size(); ++l) {
    if (!merged[l].empty()) {
      expect(run_.merged[l].empty(), 0, merged[l].front(),
             "is merged after another decision merged in its layer");
      std::ranges::sort(merged[l], {}, &Evict::token);
      run_.merged[l] = std::move(merged[l]);
    }
  }
}

void Arbiter::check_merge(const Evict& evict, Index layer) const {
  expect(run_.policy->merges(), 0, evict, "is merged by a policy that does not say that it merges");
  const Merge& merge = *evict.merge;
  const bool is_sound = std::isfinite(merge.kept_weight) && std::isfinite(merge.weight) &&
                        std::isfinite(merge.size) && merge.size > 0.0;
  expect(is_sound, 0, evict, "is merged with weights that are not finite, or a size that is not above 0");
  for (Index lane = 0; lane < lane_count(info_, run_.policy->lanes()); ++lane) {
    if (evict.lane != Evict::kEveryLane && evict.lane != lane) {
      continue;
    }
    const bool stays = evict.layer <= layer
                           ? is_resident(lane, evict.layer, merge.into)
                           : merge.into >= 0 && merge.into < info_.prompt &&
                                 !std::ranges::binary_search(run_.within[at(evict.layer)], merge.into);
    expect(stays, 0, evict, "is merged into a token that does not stay");
  }
}

void Arbiter::deferred(Index layer) {
  for (const Evict& evict : std::exchange(run_.after[at(layer)], {})) {
    apply(0, evict, false);
  }
}

void Arbiter::decode(const Decision& decision, Index step, Index layer) {
  note(decision);
  for (const Mark& marked : decision.mark) {
    mark(marked, step, layer);
  }
  for (const Evict& evict : decision.evict) {
    expect(evict.layer == layer, step, evict, "belongs to another layer");
    expect(!evict.merge, step, evict, "is merged while decoding; tokens merge in the prefill only");
    apply(step, evict, true);
  }
  recent_begin_.clear();
  check_capacity(step, layer);
}

void Arbiter::check_capacity(Index step, Index layer) const {
  const LayerCache& cache = run_.caches[at(layer)];
  for (Index lane = 0; lane < cache.lanes(); ++lane) {
    const Limits promised = run_.limits(layer, lane);
    const Index grown = promised.grows ? step : 0;
    const auto pending = static_cast<Index>(cache.pending(lane).size());
    const bool holds = (!promised.capacity || cache.residents(lane) <= *promised.capacity + grown) &&
                       (!promised.bin || pending <= *promised.bin);
    if (!holds) {
      throw ContractViolation(run_.policy->spec() + ": after step " + std::to_string(step) + " layer " +
                              std::to_string(layer) + ", lane " + std::to_string(lane) + " holds " +
                              std::to_string(cache.residents(lane)) + " tokens, " + std::to_string(pending) +
                              " of them pending: more than the policy stated");
    }
  }
}

bool Arbiter::is_resident(Index lane, Index layer, Index token) const {
  const LayerCache& cache = run_.caches[at(layer)];
  return token >= 0 && token < cache.joined() && cache.is_resident(lane, token);
}

void Arbiter::note(const Decision& decision) {
  ledger_.warnings.insert(ledger_.warnings.end(), decision.warnings.begin(), decision.warnings.end());
}

void Arbiter::expect(bool holds, Index step, const Evict& evict, const char* complaint) const {
  if (!holds) {
    throw ContractViolation(run_.policy->spec() + ": step " + std::to_string(step) + ", layer " +
                            std::to_string(evict.layer) + ", lane " + std::to_string(evict.lane) +
                            ": token " + std::to_string(evict.token) + " " + complaint);
  }
}

void Arbiter::check_lane(Index step, const Evict& evict) const {
  expect(evict.lane >= 0 && evict.lane < run_.caches[at(evict.layer)].lanes(), step, evict,
         "names a lane that does not exist");
}

void Arbiter::check_sinks(Index step, const Evict& evict, Index lane) const {
  expect(evict.token >= run_.limits(evict.layer, lane).sinks, step, evict, "is a protected sink");
}

void Arbiter::check_recent(Index step, const Evict& evict, Index lane) {
  const auto [begin, is_first] = recent_begin_.try_emplace({evict.layer, lane}, 0);
  if (is_first) {
    begin->second = run_.caches[at(evict.layer)].recent_begin(lane, run_.limits(evict.layer, lane).recent);
  }
  expect(evict.token < begin->second, step, evict, "is protected as recent");
}

void Arbiter::mark(const Mark& mark, Index step, Index layer) {
  const Evict as_evict{layer, mark.lane, mark.token, std::nullopt};
  check_lane(step, as_evict);
  LayerCache& cache = run_.caches[at(layer)];
  expect(is_resident(mark.lane, layer, mark.token), step, as_evict, "is marked but not resident");
  expect(!cache.is_pending(mark.lane, mark.token), step, as_evict, "is marked twice");
  check_sinks(step, as_evict, mark.lane);
  check_recent(step, as_evict, mark.lane);
  cache.mark(mark.lane, mark.token, step);
}

void Arbiter::apply(Index step, const Evict& evict, bool spares_recent) {
  if (evict.lane != Evict::kEveryLane) {
    check_lane(step, evict);
  }
  for (Index lane = 0; lane < run_.caches[at(evict.layer)].lanes(); ++lane) {
    if (evict.lane == Evict::kEveryLane || evict.lane == lane) {
      apply_to_lane(step, evict, lane, spares_recent);
    }
  }
}

void Arbiter::apply_to_lane(Index step, const Evict& evict, Index lane, bool spares_recent) {
  LayerCache& cache = run_.caches[at(evict.layer)];
  expect(is_resident(lane, evict.layer, evict.token), step, evict, "is evicted but not resident");
  check_sinks(step, evict, lane);
  if (spares_recent) {
    check_recent(step, evict, lane);
  }
  LogEntry entry{step, evict.layer, logged_lane(run_.policy->lanes(), lane), evict.token, false, evict.score,
                 {},   evict.merge};
  if (cache.is_pending(lane, evict.token)) {
    entry.pending_since = cache.pending_since(lane, evict.token);
  }
  cache.evict(lane, evict.token);
  ledger_.entries.push_back(entry);
}

void Arbiter::remove_within(const Evict& evict) {
  std::vector<Index>& within = run_.within[at(evict.layer)];
  const auto place = std::ranges::lower_bound(within, evict.token);
  expect(place == within.end() || *place != evict.token, 0, evict, "is evicted twice");
  within.insert(place, evict.token);
  for (Index lane = 0; lane < lane_count(info_, run_.policy->lanes()); ++lane) {
    ledger_.entries.push_back({0,
                               evict.layer,
                               logged_lane(run_.policy->lanes(), lane),
                               evict.token,
                               true,
                               evict.score,
                               {},
                               evict.merge});
  }
}

}  // namespace hae
