#pragma once

#include <vector>

#include "testing/memory_trace.hpp"

namespace hae::testing {

/// The trace with some of its tokens, ascending, the first of them of the prompt. What is kept keeps its
/// numbers; a row of probabilities is normalised again, and one that keeps none of its own attends to itself.
MemoryTrace with_tokens(const MemoryTrace& trace, const std::vector<Index>& kept);

/// Traces with a little less than this one, those with least first: half of the tokens, one layer or head
/// less, one token less, no pictures, no windows, whole numbers. For shrinking: what they keep is what it
/// was.
std::vector<MemoryTrace> smaller_traces(const MemoryTrace& trace);

}  // namespace hae::testing
