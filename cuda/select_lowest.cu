#include "cuda/select_lowest.hpp"

#include <algorithm>

#include "cuda/for_each_index.hpp"
#include "cuda/sort_in.hpp"

namespace hae::device {
namespace {

constexpr Index kScanners = 32;  // of one lane: neighbours read neighbouring tokens

HAE_HOST_DEVICE bool ranks_below_all(double score) {
  return score != score;
}
HAE_HOST_DEVICE bool ranks_below_all(std::uint64_t /*score*/) {
  return false;
}

/// The one total order of evictions, between tokens of one lane.
template <typename Score>
HAE_HOST_DEVICE bool goes_before(Score score_a, Index a, Score score_b, Index b) {
  if (ranks_below_all(score_a) != ranks_below_all(score_b)) {
    return ranks_below_all(score_a);
  }
  if (score_a < score_b || score_b < score_a) {
    return score_a < score_b;
  }
  return a < b;
}

/// The lowest eligible token among those j with j mod 32 = p; -1 if there is none.
template <typename Score>
struct PartialLowest {
  LowestSelection<Score> selection;
  Index* lowest;  ///< [lanes, 32]

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index out = index;
    const Index first = take_axis(index, kScanners);
    const Score* scores = selection.scores + index * selection.stride;
    const std::uint8_t* eligible = selection.eligible + index * selection.stride;
    Index best = -1;
    const Index end = selection.counts[index] > 0 ? selection.stride : 0;
    for (Index token = first; token < end; token += kScanners) {
      if (eligible[token] != 0 && (best < 0 || goes_before(scores[token], token, scores[best], best))) {
        best = token;
      }
    }
    lowest[out] = best;
  }
};

template <typename Score>
struct FoldLowest {
  LowestSelection<Score> selection;
  const Index* lowest;

  HAE_HOST_DEVICE void operator()(Index lane) const {
    const Score* scores = selection.scores + lane * selection.stride;
    Index best = -1;
    for (Index p = 0; p < kScanners; ++p) {
      const Index token = lowest[lane * kScanners + p];
      if (token >= 0 && (best < 0 || goes_before(scores[token], token, scores[best], best))) {
        best = token;
      }
    }
    selection.chosen[lane] = best;
  }
};

struct Enumerate {
  Index* places;

  HAE_HOST_DEVICE void operator()(Index index) const { places[index] = index; }
};

/// Orders places of [lanes, stride]: by lane, in it the eligible ones first, those by the total order.
template <typename Score>
struct PlaceBefore {
  const Score* scores;
  const std::uint8_t* eligible;
  Index stride;

  HAE_HOST_DEVICE bool operator()(Index a, Index b) const {
    if (a / stride != b / stride) {
      return a < b;
    }
    if (eligible[a] != eligible[b]) {
      return eligible[a] > eligible[b];
    }
    return eligible[a] != 0 ? goes_before(scores[a], a, scores[b], b) : a < b;
  }
};

/// Every lane fills its own stretch of the sorted places.
template <typename Score>
struct TakeFirst {
  LowestSelection<Score> selection;
  const Index* places;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index out = index;
    const Index rank = take_axis(index, selection.most);
    const Index lane = index;
    const bool is_asked = rank < selection.counts[lane] && rank < selection.stride;
    const Index place = is_asked ? places[lane * selection.stride + rank] : 0;
    const bool is_there = is_asked && selection.eligible[place] != 0;
    selection.chosen[out] = is_there ? place % selection.stride : -1;
  }
};

}  // namespace

Index select_lowest_bytes(Index lanes, Index stride, Index most) {
  const Index minimum = lanes * kScanners * Index{sizeof(Index)};
  if (most <= 1) {
    return minimum;
  }
  const Index sorting = lanes * stride * Index{sizeof(Index)} + sort_workspace_bytes<Index>(lanes * stride);
  return std::max(minimum, sorting);
}

template <typename Score>
void select_lowest(const LowestSelection<Score>& selection, void* workspace, Stream stream) {
  if (selection.most == 0 || selection.lanes == 0) {
    return;
  }
  auto* places = static_cast<Index*>(workspace);
  if (selection.most == 1) {
    for_each_index("selecting", stream, selection.lanes * kScanners, PartialLowest<Score>{selection, places});
    for_each_index("selecting", stream, selection.lanes, FoldLowest<Score>{selection, places});
    return;
  }
  const Index count = selection.lanes * selection.stride;
  for_each_index("selecting", stream, count, Enumerate{places});
  sort_in(places + count, places, count,
          PlaceBefore<Score>{selection.scores, selection.eligible, selection.stride}, stream);
  for_each_index("selecting", stream, selection.lanes * selection.most, TakeFirst<Score>{selection, places});
}

template void select_lowest(const LowestSelection<double>&, void*, Stream);
template void select_lowest(const LowestSelection<std::uint64_t>&, void*, Stream);

}  // namespace hae::device
