#pragma once

#include <map>
#include <string>
#include <vector>

#include "testing/memory_trace.hpp"

namespace hae::testing {

/// Shape of a small qkv trace of four query heads and two KV heads.
struct RecomputedShape {
  Index tokens = 30;
  Index prompt = 20;
  std::vector<Range> pictures = {{4, 12}};
  std::vector<Index> windows = {0, 0};  ///< of each layer
  bool all_equal = false;               ///< every query and key is the same: ties only
};
MemoryTrace recomputed_trace(const RecomputedShape& shape);

/// Traces at the edges, by name: sizes around a warp, ties only, no text, no picture, one token, no decode
/// step, masked rows, windows, grouped heads; attention and qkv payloads.
std::map<std::string, MemoryTrace> edge_traces();

}  // namespace hae::testing
