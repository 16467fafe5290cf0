#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "python/engine/arrays.hpp"
#include "sim/cli/comparison.hpp"
#include "sim/trace.hpp"

namespace hae::python {

/// One sequence of a trace file, or of arrays in memory, as Python holds it.
class SequenceHandle {
 public:
  /// path  of the file; empty for arrays in memory
  SequenceHandle(std::shared_ptr<TraceSource> trace, Index index, std::string path)
      : trace_(std::move(trace)), index_(index), path_(std::move(path)), sequence_(trace_->open(index)) {}

  [[nodiscard]] const SequenceInfo& info() const { return sequence_->info(); }
  [[nodiscard]] Sequence& sequence() const { return *sequence_; }
  [[nodiscard]] TraceSource& trace() const { return *trace_; }
  [[nodiscard]] Index index() const { return index_; }
  [[nodiscard]] const std::string& path() const { return path_; }

  /// As a comparison takes it. trace_index and sequence_index are those of the comparison.
  [[nodiscard]] cli::SequenceSource source(Index trace_index, Index sequence_index,
                                           std::string sha256) const {
    return {trace_, trace_index, index_, sequence_index, std::move(sha256)};
  }

 private:
  std::shared_ptr<TraceSource> trace_;
  Index index_;
  std::string path_;
  std::shared_ptr<Sequence> sequence_;
};

}  // namespace hae::python
