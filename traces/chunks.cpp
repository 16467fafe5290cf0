#include "traces/chunks.hpp"

#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "traces/message.hpp"

namespace hae::traces {
namespace {

constexpr std::size_t kChecksumBytes = 4;

[[noreturn]] void refuse_chunk(const std::string& where, const std::string& what) {
  refuse(where, ": a chunk ", what, "; it is damaged: copy or record it again");
}

/// HDF5's checksum: sums modulo 65535 of 16-bit words, most significant byte first, and of these sums.
std::uint32_t fletcher32(std::span<const std::byte> bytes) {
  constexpr std::size_t kBlock = 1 << 16;  // words whose sums cannot leave 64 bits
  std::uint64_t sum = 0;
  std::uint64_t sum_of_sums = 0;
  for (std::size_t begin = 0; begin < bytes.size(); begin += 2 * kBlock) {
    const std::size_t end = std::min(begin + 2 * kBlock, bytes.size());
    for (std::size_t at = begin; at < end; at += 2) {
      const auto second = at + 1 < end ? static_cast<std::uint64_t>(bytes[at + 1]) : 0;
      sum += static_cast<std::uint64_t>(bytes[at]) << 8 | second;
      sum_of_sums += sum;
    }
    // A sum that is not 0 stays so: 65535 stands for its multiples.
    const auto reduced = [](std::uint64_t x) { return x == 0 ? 0 : (x - 1) % 0xFFFF + 1; };
    sum = reduced(sum);
    sum_of_sums = reduced(sum_of_sums);
  }
  return static_cast<std::uint32_t>(sum_of_sums << 16 | sum);
}

void take_checksum(std::vector<std::byte>& bytes, const std::string& where) {
  if (bytes.size() < kChecksumBytes) {
    refuse_chunk(where, "is too short for its checksum");
  }
  std::uint32_t stored = 0;  // little-endian on every machine
  for (std::size_t i = kChecksumBytes; i-- > 0;) {
    stored = stored << 8 | static_cast<std::uint32_t>(bytes[bytes.size() - kChecksumBytes + i]);
  }
  bytes.resize(bytes.size() - kChecksumBytes);
  if (fletcher32(bytes) != stored) {
    refuse_chunk(where, "has another checksum than its bytes");
  }
}

std::vector<std::byte> inflated(std::span<const std::byte> packed, std::size_t bytes,
                                const std::string& where) {
  std::vector<std::byte> out(bytes);
  uLongf length = bytes;
  const int status = ::uncompress(reinterpret_cast<Bytef*>(out.data()), &length,
                                  reinterpret_cast<const Bytef*>(packed.data()), packed.size());
  if (status != Z_OK || length != bytes) {
    refuse_chunk(where, message("does not unpack to its ", bytes, " bytes (zlib says ", status, ")"));
  }
  return out;
}

/// Byte i of all elements lies together; what fills no element stands unchanged at the end.
std::vector<std::byte> unshuffled(std::span<const std::byte> bytes, std::size_t element_bytes) {
  std::vector<std::byte> out(bytes.begin(), bytes.end());
  const std::size_t elements = bytes.size() / element_bytes;
  for (std::size_t i = 0; i < element_bytes; ++i) {
    for (std::size_t element = 0; element < elements; ++element) {
      out[element * element_bytes + i] = bytes[i * elements + element];
    }
  }
  return out;
}

/// A block of a row-major array, by its first element and its extents.
struct Block {
  std::span<const Index> start;
  std::span<const Index> count;
};

/// Copies the elements that lie in both blocks. `from` holds the first block, `to` the second, row-major.
void copy_common(Block from, std::span<const std::byte> from_bytes, Block to, std::span<std::byte> to_bytes,
                 Index element_bytes) {
  const std::size_t rank = from.start.size();
  std::vector<Index> first(rank);
  std::vector<Index> end(rank);
  for (std::size_t axis = 0; axis < rank; ++axis) {
    first[axis] = std::max(from.start[axis], to.start[axis]);
    end[axis] = std::min(from.start[axis] + from.count[axis], to.start[axis] + to.count[axis]);
    if (first[axis] >= end[axis]) {
      return;
    }
  }
  std::vector<Index> at = first;
  const auto place = [&](Block block) {
    Index offset = 0;
    for (std::size_t axis = 0; axis < rank; ++axis) {
      offset = offset * block.count[axis] + at[axis] - block.start[axis];
    }
    return offset * element_bytes;
  };
  const auto run = static_cast<std::size_t>((end[rank - 1] - first[rank - 1]) * element_bytes);
  while (true) {
    std::memcpy(to_bytes.data() + place(to), from_bytes.data() + place(from), run);
    // The next row, as an odometer over all axes but the last.
    std::size_t axis = rank - 1;
    while (axis-- > 0 && ++at[axis] == end[axis]) {
      at[axis] = first[axis];
    }
    if (axis == SIZE_MAX) {
      return;
    }
  }
}

}  // namespace

const char* name_of(Filter::Kind kind) {
  switch (kind) {
    case Filter::Kind::deflate:
      return "deflate";
    case Filter::Kind::shuffle:
      return "shuffle";
    case Filter::Kind::fletcher32:
      return "fletcher32";
  }
  return "?";
}

std::vector<std::byte> unpack(StoredChunk stored, std::span<const Filter> filters, std::size_t chunk_bytes,
                              const std::string& where) {
  // Filters are undone from the last to the first; only a checksum changes the length of what deflate saw.
  std::size_t checksums = 0;
  const auto is_skipped = [&](std::size_t i) { return (stored.skipped >> i & 1U) != 0; };
  for (std::size_t i = 0; i < filters.size(); ++i) {
    checksums += filters[i].kind == Filter::Kind::fletcher32 && !is_skipped(i) ? 1 : 0;
  }
  std::vector<std::byte> bytes = std::move(stored.bytes);
  for (std::size_t i = filters.size(); i-- > 0;) {
    if (is_skipped(i)) {
      continue;
    }
    switch (filters[i].kind) {
      case Filter::Kind::fletcher32:
        take_checksum(bytes, where);
        --checksums;
        break;
      case Filter::Kind::deflate:
        bytes = inflated(bytes, chunk_bytes + checksums * kChecksumBytes, where);
        break;
      case Filter::Kind::shuffle:
        bytes = unshuffled(bytes, filters[i].element_bytes);
        break;
    }
  }
  if (bytes.size() != chunk_bytes) {
    refuse_chunk(where, message("holds ", bytes.size(), " bytes, expected ", chunk_bytes));
  }
  return bytes;
}

Index Chunking::chunk_bytes() const {
  Index bytes = element_bytes;
  for (const Index extent : chunk) {
    bytes *= extent;
  }
  return bytes;
}

Index Chunking::along(std::size_t axis) const {
  return shape[axis] / chunk[axis] + (shape[axis] % chunk[axis] != 0 ? 1 : 0);
}

const std::vector<std::byte>& ChunkReader::chunk_at(std::span<const Index> origin, const Fetch& fetch) {
  const std::vector<Index> key(origin.begin(), origin.end());
  if (const auto known = chunks_.find(key); known != chunks_.end()) {
    return known->second;
  }
  if (static_cast<Index>(chunks_.size()) >= kept_ && !oldest_.empty()) {
    chunks_.erase(oldest_.front());
    oldest_.pop_front();
  }
  std::vector<std::byte> bytes = fetch(origin);
  oldest_.push_back(key);
  return chunks_[key] = std::move(bytes);
}

void ChunkReader::read(std::span<const Index> start, std::span<const Index> count, std::span<std::byte> out,
                       const Fetch& fetch) {
  const std::size_t rank = start.size();
  std::vector<Index> first(rank);
  for (std::size_t axis = 0; axis < rank; ++axis) {
    first[axis] = start[axis] / chunking_.chunk[axis] * chunking_.chunk[axis];
  }
  std::vector<Index> origin = first;
  while (true) {
    copy_common({origin, chunking_.chunk}, chunk_at(origin, fetch), {start, count}, out,
                chunking_.element_bytes);
    // The next chunk that the block touches, last axis fastest.
    std::size_t axis = rank;
    while (axis-- > 0 && (origin[axis] += chunking_.chunk[axis]) >= start[axis] + count[axis]) {
      origin[axis] = first[axis];
    }
    if (axis == SIZE_MAX) {
      return;
    }
  }
}

}  // namespace hae::traces
