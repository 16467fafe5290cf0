#pragma once

#include "cuda/memory.hpp"

namespace hae::device {

/// Attention of one new query in each sequence and query head, over caches from which tokens were evicted.
/// All device memory; slots beyond a lane's length are not read.
struct DecodeAttention {
  Index items = 0;  ///< sequences x layers
  Index query_heads = 0;
  Index kv_heads = 0;  ///< query head h reads KV head ⌊h / (query_heads / kv_heads)⌋
  Index head_dim = 0;
  Index slots = 0;                   ///< of each KV head
  const float* scales = nullptr;     ///< [items] factor of a logit
  const float* queries = nullptr;    ///< [items, query_heads, head_dim]
  const float* keys = nullptr;       ///< [items, kv_heads, slots, head_dim]
  const float* values = nullptr;     ///< [items, kv_heads, slots, head_dim]
  const Index* positions = nullptr;  ///< [items, kv_heads, slots] ascending: where each token stood
  const Index* lengths = nullptr;    ///< [items, kv_heads] tokens a KV head holds
};

Index decode_attention_bytes(Index items, Index query_heads);

/// The canonical arithmetic (docs/arithmetic.md) with the cached tokens as the whole key set:
///
///   z_j = scale · q . k_j     w_j = exp(z_j - max z)     a_j = w_j / Σ w     o = Σ_j a_j v_j
///
/// order          logits as arithmetic::logit; Σ w in 32 partial sums by *position*, ascending, then the
/// tree:
///                what a cache evicted does not move a token from one partial sum to another; o in double,
///                slots ascending, fused (the product of two float32 numbers is exact in double)
/// An empty cache gives an output of zeros; a logit that is not finite, one that is not either.
///
/// probabilities  [items, query_heads, slots] a_j; slots beyond the length are left as they are
/// outputs        [items, query_heads, head_dim] o
/// workspace      decode_attention_bytes(items, query_heads)
void attend(const DecodeAttention& attention, void* workspace, float* probabilities, double* outputs,
            Stream stream);

}  // namespace hae::device
