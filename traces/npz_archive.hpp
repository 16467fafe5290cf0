#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sim/view.hpp"

struct zip;
struct zip_file;

// Private to this folder: `.npz` archives, which are zip files of `.npy` arrays. Nothing is allocated by a
// size that a file only declares: a declared shape must first fit the bytes that are really there.

namespace hae::traces {

/// What a `.npy` array says about itself.
struct NpyHeader {
  char kind = 0;  ///< as numpy names it: f, i, u, U, S, ...
  Index item_bytes = 0;
  bool swapped = false;  ///< bytes in the order this machine does not use
  bool fortran = false;  ///< first index fastest
  std::vector<Index> shape;

  [[nodiscard]] Index elements() const;
  /// As numpy prints it: `float16`, `int64`, ...
  [[nodiscard]] std::string type_name() const;
};

/// Reads one array from its beginning, in its stored order.
class NpyReader {
 public:
  [[nodiscard]] const NpyHeader& header() const { return header_; }
  [[nodiscard]] const std::string& where() const { return where_; }

  /// The next bytes. throws TraceError when they are damaged
  void read(std::span<std::byte> out);

  /// Call after the last byte: verifies the checksum.
  void finish();

 private:
  friend class NpzArchive;
  NpyReader(zip* archive, Index entry, std::string where, Index file_bytes);

  struct Close {
    void operator()(zip_file* file) const;
  };
  std::unique_ptr<zip_file, Close> file_;
  std::string where_;
  NpyHeader header_;
};

/// A `.npz` file, opened for reading.
class NpzArchive {
 public:
  explicit NpzArchive(const std::filesystem::path& path);

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] bool has(const std::string& array) const { return entries_.contains(array); }
  /// Names of the arrays, without `.npy`, ascending.
  [[nodiscard]] std::vector<std::string> arrays() const;
  [[nodiscard]] NpyReader open(const std::string& array) const;

 private:
  struct Close {
    void operator()(zip* archive) const;
  };
  std::string name_;
  Index bytes_ = 0;
  std::unique_ptr<zip, Close> archive_;
  std::map<std::string, Index> entries_;
};

}  // namespace hae::traces
