#include "cuda/packed_lanes.hpp"

#include "cuda/for_each_index.hpp"

namespace hae::device {
namespace {

struct Append {
  PackedLanes lanes;
  Index position;

  HAE_HOST_DEVICE void operator()(Index lane) const {
    const Index slot = lanes.lengths[lane];
    lanes.lengths[lane] = slot + 1;
    lanes.newest[lane] = slot;
    lanes.positions[lane * lanes.cache.stride + slot] = position;
    lanes.cache.resident[lane * lanes.cache.stride + slot] = 1;
  }
};

struct CloseGaps {
  PackedLanes lanes;
  const Index* kept;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index place = index;
    const Index slot = take_axis(index, lanes.cache.stride);
    lanes.cache.resident[place] = slot < kept[index] ? 1 : 0;
    lanes.cache.pending_since[place] = -1;
    if (slot == 0) {
      lanes.lengths[index] = kept[index];
      lanes.newest[index] = kept[index] - 1;
    }
  }
};

}  // namespace

void append(const PackedLanes& lanes, Index position, Stream stream) {
  for_each_index("appending", stream, lanes.cache.lanes, Append{lanes, position});
}

void close_gaps(const PackedLanes& lanes, const Index* kept, Stream stream) {
  for_each_index("closing gaps", stream, lanes.cache.lanes * lanes.cache.stride, CloseGaps{lanes, kept});
}

}  // namespace hae::device
