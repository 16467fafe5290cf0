#pragma once

#include <rapidcheck.h>

#include "testing/memory_trace.hpp"

namespace hae::testing {

/// What a generated attention row looks like.
enum class RowKind { spread, one_hot, uniform, ties, with_zeros, subnormal, masked };

/// Bounds of generated traces.
struct TraceBounds {
  Index least_tokens = 1;
  Index most_tokens = 40;
  Index most_layers = 3;
  bool allow_masked = true;
  bool allow_decode_less = true;
  bool prunable = false;              ///< the prompt ends in text and has a picture before it
  bool unrotated_queries = false;     ///< qkv: also queries before rotary embedding
  bool embedding_similarity = false;  ///< also inner products of the prompt's embeddings
  bool dyadic = false;  ///< weights are multiples of 1/64 that sum to 1 exactly, so sums over heads are exact
};

/// An attention trace: causal rows of every RowKind, grouped-query heads, pictures anywhere, V. Shrinks
/// as smaller_traces does; with dyadic rows by what it was drawn from.
rc::Gen<MemoryTrace> attention_traces(const TraceBounds& bounds = {});

/// A qkv trace of unit-scale numbers with a few outliers, grouped-query heads, pictures, windows.
rc::Gen<MemoryTrace> qkv_traces(const TraceBounds& bounds = {});

/// A trace of either payload that has what the policy needs.
rc::Gen<MemoryTrace> traces_for(const Policy& policy, TraceBounds bounds = {});

}  // namespace hae::testing
