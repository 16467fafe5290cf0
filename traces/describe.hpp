#pragma once

#include <optional>
#include <string>
#include <vector>

#include "sim/trace.hpp"
#include "traces/details.hpp"
#include "traces/trace_file.hpp"

namespace hae::traces {

/// One picture of a sequence.
struct ImageSummary {
  Index image = 0;
  std::vector<Range> spans;  ///< positions, ascending
  Index tokens = 0;
  bool has_picture = false;  ///< whether its pixels are in the trace
};

/// One sequence in numbers.
struct SequenceSummary {
  SequenceInfo info;
  std::string model;
  std::string attention_implementation;
  Index visual_tokens = 0;
  Index text_tokens = 0;
  std::vector<ImageSummary> images;  ///< ascending ids
  Index payload_bytes = 0;           ///< as stored
  std::optional<Index>
      cache_bytes;  ///< of a full cache: 2 * layers * kv_heads * T * head_dim * element_bytes
  std::vector<StoredDataset> datasets;
  std::vector<std::string> lint;  ///< what makes the trace slow or less useful; nothing of it is an error
};

/// A trace file in numbers.
struct TraceSummary {
  std::string path;
  TraceOrigin origin;
  Index bytes = 0;
  std::vector<SequenceSummary> sequences;
};

/// What is in a trace, from its metadata: no payload is read.
[[nodiscard]] TraceSummary describe(TraceFile& trace);

}  // namespace hae::traces
