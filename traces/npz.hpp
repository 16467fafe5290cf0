#pragma once

#include <filesystem>
#include <string>

#include "sim/view.hpp"
#include "traces/details.hpp"

namespace hae::traces {

/// What the importer is told.
struct NpzOptions {
  std::string name;    ///< of the sequence; empty: the file's name without `.npz`
  std::string group;   ///< sequences that share it are not independent; empty: the name
  TraceOrigin origin;  ///< written into the trace
  Index largest_array_bytes = Index{8}
                              << 30;  ///< of an array that must be held whole (Fortran order, token lists)
};

/// Makes a trace of one sequence from a `.npz` archive (README.md has the schema). Arrays in C order are
/// streamed: one head is held. Every number is checked on the way, so a trace that is written passes
/// check_trace().
///
/// throws TraceError  `FILE:/array: what was found, what was expected; what to do`; nothing is written then
void import_npz(const std::filesystem::path& from, const std::filesystem::path& to,
                const NpzOptions& options);

}  // namespace hae::traces
