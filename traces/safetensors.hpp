#pragma once

#include <filesystem>
#include <fstream>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "sim/trace.hpp"
#include "traces/float16.hpp"

// Private to this folder: `.safetensors` files, an 8-byte length, a JSON header and the tensors' bytes.
// Nothing is allocated by a size that a file only declares: the header must lie within the file, and each
// tensor within what follows it.

namespace hae::traces {

/// The longest header that is read. The format allows 100 MB; three tensors need a few hundred bytes.
inline constexpr Index kLongestSafetensorsHeader = Index{1} << 20;

/// What a file's header says about one tensor.
struct SafetensorsTensor {
  FloatType type = FloatType::float32;
  std::vector<Index> shape;
  Range bytes;  ///< after the header
};

/// A `.safetensors` file of float32, float16 and bfloat16 tensors, opened for reading. Its header is JSON
/// without repeated keys; the tensors cover the rest of the file without holes or overlaps.
///
/// throws TraceError  the file is none of this, is truncated, or is no regular file (behind links, if any)
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  [[nodiscard]] const std::string& name() const { return name_; }
  /// By name, ascending.
  [[nodiscard]] const std::map<std::string, SafetensorsTensor>& tensors() const { return tensors_; }

  /// Elements [first, first + out.size()) of a tensor of this file, row-major.
  void read(const SafetensorsTensor& tensor, Index first, std::span<float> out);

 private:
  void check_layout() const;

  std::string name_;
  std::ifstream file_;
  Range data_;  ///< where the tensors' bytes stand in the file
  std::map<std::string, SafetensorsTensor> tensors_;
};

}  // namespace hae::traces
