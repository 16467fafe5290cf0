#pragma once

#include <functional>
#include <string>
#include <vector>

#include "python/engine/sequence.hpp"

namespace hae::python {

/// Writes the sequences as a trace file, one head after another, so that one layer's queries are the most
/// that is held.
///
/// keep_going  called before each layer; it may throw to stop, and then nothing is left behind
/// throws      TraceError for a sequence that a trace file cannot hold; OutputError
void write_trace(const std::string& path, const std::vector<const SequenceHandle*>& sequences,
                 traces::FloatType type, const traces::TraceOrigin& origin,
                 const std::function<void()>& keep_going);

}  // namespace hae::python
