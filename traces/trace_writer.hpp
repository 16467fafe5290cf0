#pragma once

#include <filesystem>
#include <memory>
#include <span>

#include "sim/trace.hpp"
#include "traces/details.hpp"
#include "traces/float16.hpp"

namespace hae::traces {

/// The arrays a layer can have, and the shape of one head of each.
enum class LayerArray {
  queries,  ///< qkv: [T, head_dim]
  keys,     ///< qkv: [T, head_dim]
  values,   ///< [T, head_dim]
  prompt,   ///< attention: [stored prompt rows, P]
  decode,   ///< attention: rows of P + 1, P + 2, ... T entries, one after another
};

/// Writes a trace file, version 1 (FORMAT.md): contiguous datasets, payload aligned to 64 bytes, readable by
/// HDF5 1.10. The same calls give the same bytes.
///
/// It writes `PATH.partial`. finish() sets `complete`, closes and renames; a writer that is destroyed before
/// removes what it wrote, and `PATH` is as it was.
///
/// Heads are written one at a time, in any order of layers, arrays and heads: one head is all a caller has to
/// hold.
///
/// throws OutputError        the file cannot be written, or another process writes it
/// throws ContractViolation  a call out of order, a size that does not fit, a head written twice or never
class TraceWriter {
 public:
  TraceWriter(const std::filesystem::path& path, const TraceOrigin& origin);
  ~TraceWriter();
  TraceWriter(const TraceWriter&) = delete;
  TraceWriter& operator=(const TraceWriter&) = delete;

  /// Begins the next sequence; the one before must be whole. `info.row_sum_tolerance` follows from the type.
  void begin_sequence(const SequenceInfo& info, const SequenceDetails& details, FloatType type);

  /// One head of one array of a layer, row-major; rounded to the sequence's type, to nearest even.
  void write_head(Index layer, LayerArray array, Index head, std::span<const float> values);

  /// Ends the file. Nothing may be written after.
  void finish();

 private:
  class File;
  std::unique_ptr<File> file_;
};

}  // namespace hae::traces
