#include "cuda/lane_cache.hpp"

#include "cuda/for_each_index.hpp"

namespace hae::device {
namespace {

struct Begin {
  LaneCache cache;

  HAE_HOST_DEVICE void operator()(Index place) const {
    cache.pending_since[place] = -1;
    cache.evicted_in[place] = -1;
    cache.evicted_score[place] = 0.0;
  }
};

struct Join {
  LaneCache cache;
  const Index* tokens;

  HAE_HOST_DEVICE void operator()(Index lane) const {
    if (tokens[lane] >= 0) {
      cache.resident[lane * cache.stride + tokens[lane]] = 1;
    }
  }
};

/// First position among the newest residents that are protected.
struct FindRecent {
  LaneCache cache;
  Protection protection;
  Index* begin;

  HAE_HOST_DEVICE void operator()(Index lane) const {
    const std::uint8_t* resident = cache.resident + lane * cache.stride;
    Index first = protection.newest[lane] + 1;
    for (Index found = 0; found < protection.recent[lane] && first > 0;) {
      --first;
      found += resident[first] != 0 ? 1 : 0;
    }
    begin[lane] = first;
  }
};

struct FindEligible {
  LaneCache cache;
  const Index* sinks;
  const Index* recent_begin;
  std::uint8_t* eligible;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index place = index;
    const Index token = take_axis(index, cache.stride);
    const Index lane = index;
    const bool is_eligible = cache.resident[place] != 0 && cache.pending_since[place] < 0 &&
                             token >= sinks[lane] && token < recent_begin[lane];
    eligible[place] = is_eligible ? 1 : 0;
  }
};

HAE_HOST_DEVICE void leave(const LaneCache& cache, Index place, const double* scores, Index step) {
  cache.resident[place] = 0;
  cache.evicted_in[place] = step;
  if (scores != nullptr) {
    cache.evicted_score[place] = scores[place];
  }
}

struct EvictChosen {
  LaneCache cache;
  Chosen chosen;
  const double* scores;
  Index step;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index token = chosen.tokens[index];
    if (token >= 0) {
      leave(cache, index / chosen.most * cache.stride + token, scores, step);
    }
  }
};

struct RemoveChosen {
  LaneCache cache;
  Chosen chosen;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index token = chosen.tokens[index];
    if (token >= 0) {
      cache.resident[index / chosen.most * cache.stride + token] = 0;
    }
  }
};

struct MarkChosen {
  LaneCache cache;
  Chosen chosen;
  Index step;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index token = chosen.tokens[index];
    if (token >= 0) {
      cache.pending_since[index / chosen.most * cache.stride + token] = step;
    }
  }
};

struct EmptyBins {
  LaneCache cache;
  const std::uint8_t* is_full;
  const double* scores;
  Index step;

  HAE_HOST_DEVICE void operator()(Index place) const {
    if (is_full[place / cache.stride] != 0 && cache.resident[place] != 0 && cache.pending_since[place] >= 0) {
      leave(cache, place, scores, step);
    }
  }
};

}  // namespace

void begin_lanes(const LaneCache& cache, Stream stream) {
  for_each_index("beginning lanes", stream, cache.lanes * cache.stride, Begin{cache});
}

void join(const LaneCache& cache, const Index* tokens, Stream stream) {
  for_each_index("joining tokens", stream, cache.lanes, Join{cache, tokens});
}

void find_eligible(const LaneCache& cache, const Protection& protection, Index* recent_begin,
                   std::uint8_t* eligible, Stream stream) {
  for_each_index("protecting tokens", stream, cache.lanes, FindRecent{cache, protection, recent_begin});
  for_each_index("protecting tokens", stream, cache.lanes * cache.stride,
                 FindEligible{cache, protection.sinks, recent_begin, eligible});
}

void evict(const LaneCache& cache, const Chosen& chosen, const double* scores, Index step, Stream stream) {
  for_each_index("evicting", stream, cache.lanes * chosen.most, EvictChosen{cache, chosen, scores, step});
}

void remove(const LaneCache& cache, const Chosen& chosen, Stream stream) {
  for_each_index("removing", stream, cache.lanes * chosen.most, RemoveChosen{cache, chosen});
}

void mark(const LaneCache& cache, const Chosen& chosen, Index step, Stream stream) {
  for_each_index("marking", stream, cache.lanes * chosen.most, MarkChosen{cache, chosen, step});
}

void empty_bins(const LaneCache& cache, const std::uint8_t* is_full, const double* scores, Index step,
                Stream stream) {
  for_each_index("emptying recycle bins", stream, cache.lanes * cache.stride,
                 EmptyBins{cache, is_full, scores, step});
}

}  // namespace hae::device
