#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "sim/view.hpp"

namespace hae::traces {

/// One array of a stored problem, in words: what they mean is validate's affair.
struct StoredTensor {
  std::string name;
  std::string type;
  std::vector<std::string> axes;
  std::string counts;          ///< an axis, or `none`
  std::vector<double> values;  ///< exact; none for an output

  bool operator==(const StoredTensor&) const = default;
};

/// A call of a kernel that can be repeated: `hae validate --repro FILE`.
struct StoredProblem {
  std::string operation;
  std::string case_name;  ///< that it was shrunk from
  std::vector<std::pair<std::string, Index>> extents;
  std::vector<std::pair<std::string, Index>> layout;
  std::vector<std::pair<std::string, double>> numbers;
  std::vector<StoredTensor> inputs;
  std::vector<StoredTensor> outputs;

  bool operator==(const StoredProblem&) const = default;
};

/// Writes a problem as HDF5 (layout: FORMAT.md, "Problem files"). throws OutputError
void write_problem(const std::filesystem::path& path, const StoredProblem& problem);

/// Reads one back, trusting nothing of its layout; whether the words mean anything is for the caller.
///
/// throws  TraceError
StoredProblem read_problem(const std::filesystem::path& path);

}  // namespace hae::traces
