#pragma once

#include "cuda/decode_attention.hpp"

namespace hae::device {

/// Decode attention as an engine that does not care for the order of sums computes it, in float32 throughout
/// and without giving its probabilities away: what benchmarks measure the others against.
///
/// outputs  [items, query_heads, head_dim]; head_dim at most 256
void attend_plainly(const DecodeAttention& attention, float* outputs, Stream stream);

}  // namespace hae::device
