#pragma once

#include <string>
#include <vector>

namespace hae::cli {

/// The trace files that a command's arguments stand for, in their order: a folder stands for the `*.h5` files
/// in it, sorted by name, hidden ones and those of its folders left out, as a shell would find them.
///
/// throws  TraceError for a folder that has none, or cannot be listed
std::vector<std::string> trace_files(const std::vector<std::string>& paths);

}  // namespace hae::cli
