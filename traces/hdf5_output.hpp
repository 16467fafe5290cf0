#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "sim/partial_file.hpp"
#include "traces/hdf5.hpp"

// Private to this folder: a file being written, beside its target and under a temporary name.

namespace hae::traces::hdf5 {

/// A scalar string attribute, UTF-8, of variable length.
void write_attribute(hid_t object, const std::string& name, const std::string& value);
/// A scalar 64-bit integer attribute.
void write_attribute(hid_t object, const std::string& name, Index value);
/// A scalar float64 attribute.
void write_attribute(hid_t object, const std::string& name, double value);

/// The file's type of a payload: little-endian, and what FORMAT.md calls float32, float16 and bfloat16.
[[nodiscard]] Handle payload_type(FloatType type);

/// Writes a PartialFile; finish() sets `complete`, closes and renames. One that is destroyed before removes
/// what it wrote. Datasets are contiguous, take their space at once and carry no times, so equal calls give
/// equal bytes. Hold a Guard around its calls, and close what was created before finish().
class OutputFile {
 public:
  /// format and version: the root's attributes. throws OutputError when the file cannot be made or is being
  /// written
  OutputFile(const std::filesystem::path& path, const std::string& format, Index version);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  [[nodiscard]] const Handle& root() const { return root_; }
  [[nodiscard]] std::string name() const { return file_name_.path(); }
  [[nodiscard]] bool finished() const { return file_name_.committed(); }

  [[nodiscard]] Handle create_group(hid_t parent, const std::string& name) const;
  [[nodiscard]] Handle create_dataset(hid_t parent, const std::string& name, hid_t type,
                                      std::span<const hsize_t> shape) const;
  void write_integers(hid_t parent, const std::string& name, std::span<const Index> values,
                      std::span<const hsize_t> shape) const;
  void write_integers(hid_t parent, const std::string& name, std::span<const Index> values) const;
  void write_reals(hid_t parent, const std::string& name, std::span<const double> values,
                   std::span<const hsize_t> shape) const;
  void write_reals(hid_t parent, const std::string& name, std::span<const double> values) const;
  void write_strings(hid_t parent, const std::string& name, std::span<const std::string> values) const;
  void finish();

  /// Turns a failed call of the library into an OutputError.
  void check(herr_t status, const std::string& what) const;

 private:
  void create(const std::string& format, Index version);
  void close();
  [[nodiscard]] Handle opened(hid_t id, const std::string& what) const;

  PartialFile file_name_;
  Handle file_;
  Handle root_;
};

}  // namespace hae::traces::hdf5
