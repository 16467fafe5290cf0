#include "cuda/dual_attention_pruning.hpp"

#include "cuda/for_each_index.hpp"
#include "cuda/parts.hpp"
#include "cuda/select_lowest.hpp"

namespace hae::device {
namespace {

/// A rule as a device reads it.
struct Thresholds {
  double r, eps, alpha;
  bool has_alpha;
  Index sinks;

  explicit Thresholds(const PruningRule& rule)
      : r(rule.r),
        eps(rule.eps),
        alpha(rule.alpha.value_or(0.0)),
        has_alpha(rule.alpha.has_value()),
        sinks(rule.sinks) {}

  [[nodiscard]] HAE_HOST_DEVICE bool spares(Index token, double largest) const {
    return token < sinks || (has_alpha && largest >= alpha);
  }
};

HAE_HOST_DEVICE bool is_candidate(const PruningSums& sums, Index place) {
  return sums.scope[place] >= 0 && sums.seen[place] != 0;
}

/// A_V of one scope of one item.
struct ScopeMass {
  PruningSums sums;
  double* masses;  ///< [items, scopes]

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index out = index;
    const Index scope = take_axis(index, sums.scopes);
    double mass = 0.0;
    for (Index place = index * sums.stride; place < (index + 1) * sums.stride; ++place) {
      if (is_candidate(sums, place) && sums.scope[place] == scope) {
        mass += sums.sums[place];
      }
    }
    masses[out] = mass;
  }
};

struct BelowThresholds {
  PruningSums sums;
  Thresholds rule;
  const double* masses;
  std::uint8_t* evicted;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index place = index;
    const Index token = take_axis(index, sums.stride);
    bool goes = is_candidate(sums, place) && !rule.spares(token, sums.largest[place]);
    if (goes) {
      const double threshold = rule.r * masses[index * sums.scopes + sums.scope[place]];
      goes = sums.sums[place] < threshold;
    }
    evicted[place] = goes ? 1 : 0;
  }
};

struct MayGo {
  PruningSums sums;
  Thresholds rule;
  std::uint8_t* eligible;
  std::uint8_t* evicted;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index place = index;
    const Index token = take_axis(index, sums.stride);
    eligible[place] = is_candidate(sums, place) && !rule.spares(token, sums.largest[place]) ? 1 : 0;
    evicted[place] = 0;
  }
};

/// Walks through an item's tokens in their order and takes those of one scope while they may be lost.
struct WithinMass {
  PruningSums sums;
  Thresholds rule;
  const double* masses;
  const Index* order;  ///< [items, stride] candidates that may go; then -1
  std::uint8_t* evicted;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const double mass = masses[index];
    const Index scope = take_axis(index, sums.scopes);
    const Index first = index * sums.stride;
    if (mass == 0.0) {
      return;
    }
    const double allowed = rule.eps * mass;
    double lost = 0.0;
    for (Index rank = 0; rank < sums.stride && order[first + rank] >= 0; ++rank) {
      const Index place = first + order[first + rank];
      if (sums.scope[place] != scope) {
        continue;
      }
      if (rule.eps < 1.0 && !(lost + sums.sums[place] <= allowed)) {
        return;
      }
      lost += sums.sums[place];
      evicted[place] = 1;
    }
  }
};

struct Fill {
  Index* numbers;
  Index value;

  HAE_HOST_DEVICE void operator()(Index index) const { numbers[index] = value; }
};

struct Forget {
  std::uint8_t* evicted;

  HAE_HOST_DEVICE void operator()(Index place) const { evicted[place] = 0; }
};

struct EvictChosen {
  const Index* chosen;  ///< [items, most]
  Index most, stride;
  std::uint8_t* evicted;

  HAE_HOST_DEVICE void operator()(Index index) const {
    if (chosen[index] >= 0) {
      evicted[index / most * stride + chosen[index]] = 1;
    }
  }
};

/// The arrays in the work space.
struct Work {
  double* masses;
  std::uint8_t* eligible;
  Index* counts;
  Index* chosen;
  void* selecting;
  Index bytes;

  Work(void* memory, Index items, Index stride, Index scopes) {
    Parts parts(memory);
    masses = parts.take<double>(items * scopes);
    eligible = parts.take<std::uint8_t>(items * stride);
    counts = parts.take<Index>(items);
    chosen = parts.take<Index>(items * stride);
    selecting = parts.take<char>(select_lowest_bytes(items, stride, stride));
    bytes = parts.bytes();
  }
};

void select(const PruningSums& sums, const std::uint8_t* eligible, Index count, const Work& work,
            Stream stream) {
  for_each_index("pruning", stream, sums.items, Fill{work.counts, count});
  select_lowest(LowestSelection<double>{.lanes = sums.items,
                                        .stride = sums.stride,
                                        .scores = sums.sums,
                                        .eligible = eligible,
                                        .counts = work.counts,
                                        .most = count,
                                        .chosen = work.chosen},
                work.selecting, stream);
}

}  // namespace

Index pruning_workspace_bytes(Index items, Index stride, Index scopes) {
  return Work(nullptr, items, stride, scopes).bytes;
}

void choose_pruned(const PruningSums& sums, const PruningRule& rule, void* workspace, std::uint8_t* evicted,
                   Stream stream) {
  const Work work(workspace, sums.items, sums.stride, sums.scopes);
  const Thresholds thresholds(rule);
  const Index places = sums.items * sums.stride;
  for_each_index("pruning", stream, sums.items * sums.scopes, ScopeMass{sums, work.masses});
  if (rule.kind == PruningRule::Kind::threshold) {
    for_each_index("pruning", stream, places, BelowThresholds{sums, thresholds, work.masses, evicted});
  } else {
    for_each_index("pruning", stream, places, MayGo{sums, thresholds, work.eligible, evicted});
    select(sums, work.eligible, sums.stride, work, stream);
    for_each_index("pruning", stream, sums.items * sums.scopes,
                   WithinMass{sums, thresholds, work.masses, work.chosen, evicted});
  }
  if (rule.max_evicted && *rule.max_evicted < sums.stride) {
    const Index most = *rule.max_evicted;
    select(sums, evicted, most, work, stream);
    for_each_index("pruning", stream, places, Forget{evicted});
    for_each_index("pruning", stream, sums.items * most,
                   EvictChosen{work.chosen, most, sums.stride, evicted});
  }
}

}  // namespace hae::device
