#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "sim/view.hpp"

// Private to this folder: the chunks of a dataset, unpacked here. HDF5 finds and copies a chunk; its own
// unpacking grows a buffer without a bound, and believes that what comes out is as long as it should be.

namespace hae::traces {

/// One step of packing, in the order of writing.
struct Filter {
  enum class Kind { deflate, shuffle, fletcher32 };
  Kind kind;
  std::size_t element_bytes = 1;  ///< shuffle: bytes of the elements whose bytes it groups

  bool operator==(const Filter&) const = default;
};

[[nodiscard]] const char* name_of(Filter::Kind kind);

/// A chunk as the file holds it.
struct StoredChunk {
  std::vector<std::byte> bytes;
  unsigned skipped = 0;  ///< bit i: filter i was not applied to this chunk
};

/// The bytes of a chunk, which are exactly `chunk_bytes`. Nothing larger is allocated than that and 4 bytes a
/// filter. throws TraceError when it is damaged
[[nodiscard]] std::vector<std::byte> unpack(StoredChunk stored, std::span<const Filter> filters,
                                            std::size_t chunk_bytes, const std::string& where);

/// How a dataset is cut into chunks.
struct Chunking {
  std::vector<Index> shape;
  std::vector<Index> chunk;
  Index element_bytes = 0;

  [[nodiscard]] Index chunk_bytes() const;
  /// How many chunks lie along an axis.
  [[nodiscard]] Index along(std::size_t axis) const;
};

/// Reads blocks from chunks, and keeps the latest chunks so that reading rows in order unpacks each once.
class ChunkReader {
 public:
  /// fetch: the unpacked chunk that begins at an element.
  using Fetch = std::function<std::vector<std::byte>(std::span<const Index> origin)>;

  ChunkReader() = default;
  ChunkReader(Chunking chunking, Index kept_chunks) : chunking_(std::move(chunking)), kept_(kept_chunks) {}

  void read(std::span<const Index> start, std::span<const Index> count, std::span<std::byte> out,
            const Fetch& fetch);

 private:
  const std::vector<std::byte>& chunk_at(std::span<const Index> origin, const Fetch& fetch);

  Chunking chunking_;
  Index kept_ = 0;
  std::map<std::vector<Index>, std::vector<std::byte>> chunks_;
  std::deque<std::vector<Index>> oldest_;
};

}  // namespace hae::traces
