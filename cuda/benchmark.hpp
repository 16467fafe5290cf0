#pragma once

#include <string>
#include <vector>

#include "cuda/memory.hpp"

namespace hae::device {

/// Caches to measure on: all hold the same number of tokens.
struct BenchmarkShape {
  Index sequences = 1;
  Index layers = 1;
  Index query_heads = 1;
  Index kv_heads = 1;
  Index head_dim = 1;       ///< at most 256
  Index tokens = 1;         ///< l: held by each KV head before a step
  std::vector<Index> bins;  ///< D
};

/// One operation on all caches at once.
struct OperationTime {
  std::string name;
  double seconds = 0;  ///< of one call, mean of several
  double bytes = 0;    ///< that it must at least read and write
};

/// A decode step with a recycle bin of capacity D: attention, scores, one token marked in each lane, and in
/// every D-th step the marked ones compacted away. D = 1 is greedy eviction, which compacts in every step.
struct StepTime {
  Index bin = 1;
  double seconds = 0;           ///< of a step, mean over whole fillings of the bin
  double seconds_evicting = 0;  ///< of that, all but the attention
};

struct BenchmarkResult {
  Index bytes_on_device = 0;
  double plain_attention_seconds = 0;  ///< over the same K and V
  double largest_difference = 0;       ///< between outputs of both attentions, relative to the largest output
  std::vector<OperationTime> operations;
  std::vector<StepTime> steps;
};

/// Bytes a second that a plain copy of `bytes` bytes moves, reading and writing counted.
double copy_bandwidth(Index bytes);

/// Measures one shape. throws DeviceError when it does not fit into memory
BenchmarkResult measure(const BenchmarkShape& shape);

}  // namespace hae::device
