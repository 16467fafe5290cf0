#pragma once

#include <string>
#include <vector>

#include "testing/memory_trace.hpp"

namespace hae::testing {

/// A synthetic trace and the name the tables know it by.
struct GoldenCase {
  std::string name;
  MemoryTrace trace;
};

/// Small traces in memory that reach what the recordings do not: head dimensions from 1 to 130, grouped
/// heads, windows, pictures that see themselves, numbers of 16 bits, recorded probabilities, weights that
/// underflow, one token. Their numbers come from a counter and from correctly rounded operations: the same
/// bits on every machine.
std::vector<GoldenCase> golden_cases();

}  // namespace hae::testing
