#pragma once

#include <filesystem>
#include <optional>

#include "sim/view.hpp"
#include "traces/sequence_arguments.hpp"

namespace hae::traces {

/// What the importer is told.
struct AttentionSaverOptions {
  SequenceArguments sequence;
  std::optional<Index> batch;     ///< which one; none: the only one there is
  std::optional<Index> kv_heads;  ///< none: as many as query heads
  std::optional<Index> head_dim;  ///< none: nothing is known in bytes
  bool lock = true;               ///< hold a shared lock on the file while it is read
};

/// Makes an `attention` trace of one sequence from an HDF5 file as the Python package attention-saver writes
/// them: a dataset `/layer_{l}/batch_{b}/head_{h}` [T, T] for each query head, row i the attention of token
/// i. Every layer and head must be there. The file is streamed: held are one head and, where it is chunked, a
/// band of its rows and their unpacked chunks. Every row is checked on the way, so a trace that is written
/// passes check_trace(). Padding is left as it is.
///
/// throws TraceError   `FILE:/dataset: what was found, what was expected; what to do`; nothing is written
/// throws ConfigError  an option that does not fit the file
void import_attention_saver(const std::filesystem::path& from, const std::filesystem::path& to,
                            const AttentionSaverOptions& options);

}  // namespace hae::traces
