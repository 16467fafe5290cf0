#include "cuda/compact.hpp"

#include <algorithm>

#include "cuda/for_each_index.hpp"

namespace hae::device {
namespace {

struct alignas(16) Words16 {
  std::uint64_t low, high;
};

template <typename Word>
struct MoveWords {
  Compaction compaction;
  const Word* from;
  Word* to;
  Index row_words;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index word = take_axis(index, row_words);
    const std::uint8_t* keep = compaction.keep + index * compaction.slots;
    const Index first = index * compaction.slots * row_words + word;
    const Index length = compaction.lengths[index];
    Index slot = 0;
    if (from == to) {
      while (slot < length && keep[slot] != 0) {
        ++slot;  // What is below the first gap stays where it is.
      }
    }
    Index next = slot;
    for (; slot < length; ++slot) {
      if (keep[slot] != 0) {
        to[first + next * row_words] = from[first + slot * row_words];
        ++next;
      }
    }
  }
};

struct CountKept {
  Compaction compaction;
  Index* kept;

  HAE_HOST_DEVICE void operator()(Index lane) const {
    Index count = 0;
    for (Index slot = 0; slot < compaction.lengths[lane]; ++slot) {
      count += compaction.keep[lane * compaction.slots + slot] != 0 ? 1 : 0;
    }
    kept[lane] = count;
  }
};

/// The widest word in which rows can be moved: their length and both addresses are multiples of it.
std::uintptr_t word_bytes(const CompactedRows& rows) {
  const auto bits = reinterpret_cast<std::uintptr_t>(rows.from) | reinterpret_cast<std::uintptr_t>(rows.to) |
                    static_cast<std::uintptr_t>(rows.row_bytes);
  return std::min<std::uintptr_t>(16, bits & -bits);
}

template <typename Word>
void move(const Compaction& compaction, const CompactedRows& rows, Stream stream) {
  const Index row_words = rows.row_bytes / Index{sizeof(Word)};
  for_each_index("compacting", stream, compaction.lanes * row_words,
                 MoveWords<Word>{compaction, static_cast<const Word*>(rows.from), static_cast<Word*>(rows.to),
                                 row_words});
}

}  // namespace

void compact(const Compaction& compaction, std::span<const CompactedRows> arrays, Index* kept,
             Stream stream) {
  for (const CompactedRows& rows : arrays) {
    HAE_EXPECTS(rows.row_bytes > 0 && rows.row_bytes % 2 == 0);
    switch (word_bytes(rows)) {
      case 16:
        move<Words16>(compaction, rows, stream);
        break;
      case 8:
        move<std::uint64_t>(compaction, rows, stream);
        break;
      case 4:
        move<std::uint32_t>(compaction, rows, stream);
        break;
      default:
        move<std::uint16_t>(compaction, rows, stream);
    }
  }
  for_each_index("compacting", stream, compaction.lanes, CountKept{compaction, kept});
}

}  // namespace hae::device
