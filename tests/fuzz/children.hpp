#pragma once

#include <string>

namespace hae::traces::fuzz {

/// Watches the children that this process forks: their coverage counts, and what the sanitizers say about our
/// own code in them is kept. Without sanitizers it watches nothing.
void watch_children();

/// What a sanitizer said about our own code in a child since the last call; empty: nothing. Reports whose
/// stack goes through HDF5 are not ours.
[[nodiscard]] std::string report_of_child();

}  // namespace hae::traces::fuzz
