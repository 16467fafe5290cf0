#pragma once

#include <array>
#include <string>
#include <vector>

#include "sim/view.hpp"

namespace hae::traces {

/// The file format this folder reads and writes (FORMAT.md).
inline constexpr Index kFormatVersion = 1;

/// Who made a trace file.
struct TraceOrigin {
  std::string recorder;   ///< program and version
  std::string libraries;  ///< `name version, name version`
  std::string command;

  bool operator==(const TraceOrigin&) const = default;
};

/// What a trace says about one sequence that no replay needs. Each list is empty when the trace lacks it.
struct SequenceDetails {
  std::string model;
  std::string attention_implementation;
  std::vector<Index> frame;                 ///< [T] frame of a video, -1 for text
  std::vector<std::array<Index, 2>> patch;  ///< [T] row and column, -1 -1 where there is none
  std::vector<Index> position;              ///< [T * position_axes] what the rotary embedding was given
  Index position_axes = 1;
  std::vector<Index> token_id;     ///< [T]
  std::vector<std::string> token;  ///< [T] the token as text

  bool operator==(const SequenceDetails&) const = default;
};

}  // namespace hae::traces
