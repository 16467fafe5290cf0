#pragma once

#include <memory>
#include <string>

#include "python/engine/array_trace.hpp"
#include "sim/cli/comparison.hpp"
#include "sim/trace.hpp"
#include "traces/trace_file.hpp"

namespace hae::python {

/// One sequence of a trace file, or of arrays in memory, as Python holds it.
class SequenceHandle {
 public:
  SequenceHandle(std::shared_ptr<traces::TraceFile> file, Index index, std::string path)
      : file_(std::move(file)), index_(index), path_(std::move(path)), sequence_(file_->open(index)) {}
  explicit SequenceHandle(std::shared_ptr<ArrayTrace> arrays)
      : arrays_(std::move(arrays)), sequence_(arrays_->open(0)) {}

  [[nodiscard]] const SequenceInfo& info() const { return sequence_->info(); }
  [[nodiscard]] Sequence& sequence() const { return *sequence_; }
  [[nodiscard]] Index index() const { return index_; }

  /// Of the file; empty for arrays in memory.
  [[nodiscard]] const std::string& path() const { return path_; }

  [[nodiscard]] traces::SequenceDetails details() const {
    return file_ ? file_->details(index_) : arrays_->details();
  }

  /// As a comparison takes it. trace_index and sequence_index are those of the comparison.
  [[nodiscard]] cli::SequenceSource source(Index trace_index, Index sequence_index,
                                           std::string sha256) const {
    return {trace(), trace_index, index_, sequence_index, std::move(sha256)};
  }

  /// Where it came from, as messages name it.
  [[nodiscard]] std::string where() const { return trace()->name() + ": sequence '" + info().name + "'"; }

 private:
  [[nodiscard]] std::shared_ptr<TraceSource> trace() const {
    return file_ ? std::shared_ptr<TraceSource>(file_) : arrays_;
  }

  std::shared_ptr<traces::TraceFile> file_;  ///< null for arrays in memory
  std::shared_ptr<ArrayTrace> arrays_;       ///< null for a file
  Index index_ = 0;
  std::string path_;
  std::shared_ptr<Sequence> sequence_;
};

}  // namespace hae::python
