#pragma once

#include <hdf5.h>

#include <cstddef>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "sim/view.hpp"
#include "traces/chunks.hpp"
#include "traces/float16.hpp"
#include "traces/isolated.hpp"

// Private to this folder: the HDF5 C API behind owners, with every check that a file from elsewhere needs.
// A path is walked one hard link at a time; a dataset is fully checked before one of its bytes is read. The
// library itself crashes on damaged metadata, so metadata is read in a child process first (File::walk).

namespace hae::traces::hdf5 {

/// Nothing larger is read as one chunk: a chunk is what the library holds in memory at once.
inline constexpr Index kLargestChunkBytes = Index{1} << 30;

/// The most a dataset's chunk cache takes.
inline constexpr Index kLargestCacheBytes = Index{1} << 29;

/// Held around every use of the library, which is not safe for threads: one lock a process. While it is held
/// the library keeps its error stack to itself. A thread may hold several.
class Guard {
 public:
  Guard();
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  H5E_auto2_t print_ = nullptr;
  void* print_data_ = nullptr;
};

/// Owns one HDF5 identifier of any kind.
class Handle {
 public:
  Handle() = default;
  explicit Handle(hid_t id) : id_(id) {}
  Handle(Handle&& other) noexcept : id_(std::exchange(other.id_, H5I_INVALID_HID)) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(id_, other.id_);
    return *this;
  }
  ~Handle();

  [[nodiscard]] hid_t get() const { return id_; }
  [[nodiscard]] bool valid() const { return id_ >= 0; }
  /// Gives the identifier up without closing it.
  hid_t release() { return std::exchange(id_, H5I_INVALID_HID); }

 private:
  hid_t id_ = H5I_INVALID_HID;
};

/// What the library says about its latest failure, innermost first; for the end of a message.
[[nodiscard]] std::string library_reason();

/// What tells one floating-point layout from another.
struct FloatFields {
  std::size_t bytes, sign, exponent, exponent_bits, bias, mantissa, mantissa_bits;
  bool operator==(const FloatFields&) const = default;
};

inline constexpr FloatFields kFloat16{2, 15, 10, 5, 15, 0, 10};
inline constexpr FloatFields kBfloat16{2, 15, 7, 8, 127, 0, 7};
inline constexpr FloatFields kFloat32{4, 31, 23, 8, 127, 0, 23};
inline constexpr FloatFields kFloat64{8, 63, 52, 11, 1023, 0, 52};

/// What a dataset is to hold.
enum class Content {
  integers,  ///< of at most 8 bytes, of either sign
  payload,   ///< float32, float16 or bfloat16
  reals,     ///< float32 or float64
  bytes,     ///< uint8
  strings,   ///< of fixed length
};

/// Where the bytes of a dataset stand.
enum class Storage { compact, contiguous, chunked };

/// An axis' name and the size it must have; without a size any will do.
struct Axis {
  const char* name;
  std::optional<Index> extent;
};

class Group;
class File;

/// One dataset, opened and checked.
class Dataset {
 public:
  [[nodiscard]] const std::string& where() const { return where_; }
  [[nodiscard]] const std::vector<Index>& shape() const { return shape_; }
  [[nodiscard]] const std::vector<Index>& chunk() const { return chunk_; }
  [[nodiscard]] Storage storage() const { return storage_; }
  [[nodiscard]] Index elements() const;
  [[nodiscard]] Index declared_bytes() const { return elements() * element_bytes_; }
  [[nodiscard]] Index stored_bytes() const { return stored_bytes_; }
  [[nodiscard]] bool swapped() const { return swapped_; }
  [[nodiscard]] FloatType float_type() const { return float_type_; }
  [[nodiscard]] const std::string& type_name() const { return type_name_; }
  [[nodiscard]] const std::vector<Filter>& filters() const { return filters_; }

  /// Throws TraceError unless the shape is one of these axes.
  void expect_shape(std::span<const Axis> axes) const;

  /// The stored codes, when the dataset is contiguous and the file is mapped; else nothing.
  [[nodiscard]] const std::byte* mapped() const { return mapped_; }

  /// Integers of any stored type, row-major.
  [[nodiscard]] std::vector<Index> read_integers() const;

  /// Reals as float64, row-major.
  [[nodiscard]] std::vector<double> read_reals() const;

  /// Fixed-length strings without their padding.
  [[nodiscard]] std::vector<std::string> read_strings() const;

  /// A hyperslab of a payload, row-major.
  void read(std::span<const Index> start, std::span<const Index> count, std::span<float> out) const;

 private:
  friend class Group;
  Dataset(const File& file, hid_t parent, const std::string& name, std::string where, Content content);

  void check_layout(hid_t properties);
  void check_filters(hid_t properties);
  void check_type(Content content);
  void read_shape();
  void check_compact() const;
  void check_contiguous(const File& file);
  void check_chunks(const File& file, hid_t properties);
  [[nodiscard]] StoredChunk fetch(std::span<const Index> origin) const;
  void read_codes(std::span<const Index> start, std::span<const Index> count, std::span<std::byte> out) const;
  void read_all_codes(std::span<std::byte> out) const;
  template <typename Number>
  [[nodiscard]] std::vector<Number> read_as(hid_t number_type) const;
  void read_mapped(std::span<const Index> start, std::span<const Index> count, std::span<float> out) const;
  void read_buffered(std::span<const Index> start, std::span<const Index> count, std::span<float> out) const;

  std::string where_;
  Handle id_;
  Handle type_;
  std::vector<Index> shape_;
  std::vector<Index> chunk_;
  std::vector<Filter> filters_;
  mutable ChunkReader chunks_;  // keeps the latest chunks
  Storage storage_ = Storage::contiguous;
  Index element_bytes_ = 0;
  Index stored_bytes_ = 0;
  FloatType float_type_ = FloatType::float32;
  bool swapped_ = false;
  std::string type_name_;
  const std::byte* mapped_ = nullptr;
};

/// One group, or an attribute holder.
class Group {
 public:
  [[nodiscard]] const std::string& where() const { return where_; }

  /// Whether a link of this name exists, of whatever kind. throws TraceError when the library cannot tell
  [[nodiscard]] bool has(const std::string& name) const;

  /// How many links the group has.
  [[nodiscard]] Index members() const;

  /// The names of those links, ascending byte by byte.
  [[nodiscard]] std::vector<std::string> names() const;

  [[nodiscard]] Group group(const std::string& name) const;
  [[nodiscard]] Dataset dataset(const std::string& name, Content content) const;

  [[nodiscard]] bool has_attribute(const std::string& name) const;
  [[nodiscard]] Index integer(const std::string& name) const;
  [[nodiscard]] double real(const std::string& name) const;
  [[nodiscard]] std::string string(const std::string& name) const;

 private:
  friend class File;
  Group(const File& file, Handle id, std::string where)
      : file_(&file), id_(std::move(id)), where_(std::move(where)) {}
  [[nodiscard]] Handle attribute(const std::string& name) const;
  [[noreturn]] void refuse_attribute(const std::string& name, const std::string& expected) const;

  const File* file_;
  Handle id_;
  std::string where_;
};

/// A file open for reading: its path, its lock, its map and the library's handle. Groups and datasets must
/// not outlive it. The library sees the file when its metadata is first asked for.
class File {
 public:
  /// lock: hold a shared lock while open. map: map the file into memory, if the system can.
  File(std::filesystem::path path, bool lock, bool map);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  [[nodiscard]] std::string name() const { return path_.string(); }
  [[nodiscard]] Index bytes() const { return bytes_; }
  [[nodiscard]] std::span<const std::byte> map() const { return map_; }

  /// `read(root)`, which reads metadata, first in a child process and, when it survives there, here.
  template <typename Read>
  auto walk(Read read) const {
    const Guard guard;  // held over both, so that the library is in the same state
    rehearse(read);
    return read(root());
  }

  /// The first half of walk(): what has been read there can be read here later.
  template <typename Read>
  void rehearse(Read read) const {
    const Guard guard;
    traces::rehearse(name(), bytes_, [&] {
      static_cast<void>(read(root()));
      id_ = Handle();  // closing frees what a damaged file may have spoilt
    });
  }

  /// The root group, for what a walk has met.
  [[nodiscard]] Group root() const;

 private:
  void open_descriptor(bool lock);
  void check_signature() const;
  void open_library() const;

  std::filesystem::path path_;
  int descriptor_ = -1;
  Index bytes_ = 0;
  std::span<const std::byte> map_;
  mutable Handle id_;  // opened by the first walk
};

}  // namespace hae::traces::hdf5
