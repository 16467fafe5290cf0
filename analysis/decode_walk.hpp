#pragma once

#include <span>
#include <string>

#include "sim/replay.hpp"

namespace hae::analysis {

/// One decode row of a recorded sequence, and what a run held while it attended.
struct DecodeRow {
  Index layer = 0;
  Index step = 0;
  const WeightBlock& block;           ///< full-cache weights of some rows of the layer
  Index row = 0;                      ///< this one in the block
  const LayerCache& cache;            ///< residents at the row's attention, its own token included
  View<const float, 3> values;        ///< [kv_heads, T, head_dim]; empty without V
  std::span<const LogEntry> evicted;  ///< what leaves the layer after the row, ascending by (lane, token)
};

/// Looks at decode rows. Rows of a layer ascend and come one after another; layers come on any thread.
class DecodeVisitor {
 public:
  virtual ~DecodeVisitor() = default;

  /// Before a layer's first row.
  ///
  /// evicted  what left the layer in step 0, ascending by (lane, token)
  virtual void begin_layer(Index /*layer*/, std::span<const LogEntry> /*evicted*/) {}

  virtual void row(const DecodeRow& row) = 0;
};

/// Reads the decode steps of a sequence once more, beside the evictions of a run.
///
/// run      of this sequence; it must not merge. Its marks are not followed
/// options  nan, for_each, block_rows and progress are used
/// where    begins the message of an error
/// throws   TraceError for a payload that breaks the format
void walk_decode(Sequence& sequence, const RunResult& run, const ReplayOptions& options,
                 const std::string& where, std::span<DecodeVisitor* const> visitors);

}  // namespace hae::analysis
