#pragma once

#include <cstdint>

#include "cuda/layer_mask.hpp"
#include "cuda/memory.hpp"

namespace hae::device {

/// Rows of attention of several items at once; an item is one layer of one sequence. All arrays are device
/// memory, row-major, and items share their strides, so shorter ones leave the ends of their rows unused.
struct RowBlock {
  Index items = 0;
  Index query_heads = 0;
  Index kv_heads = 0;
  Index rows = 0;                    ///< of each head, in these arrays
  Range active;                      ///< the rows that an operation works on
  Index keys = 0;                    ///< keys of a row: a multiple of 32
  const Index* queries = nullptr;    ///< [items, rows] positions; -1 where an item has no such row
  const LayerMask* masks = nullptr;  ///< [items]
  float* weights = nullptr;          ///< [items, query_heads, rows, keys] w_j; 0 where the mask forbids
  float* sums = nullptr;             ///< [items, query_heads, rows] canonical sum of w over all keys

  /// Rows of all heads that an operation works on.
  [[nodiscard]] Index active_rows() const { return items * query_heads * active.size(); }
};

/// Queries and keys to recompute a block's weights from.
struct QueriesAndKeys {
  Index head_dim = 0;
  Index tokens = 0;                ///< of the longest item: the stride of queries
  Index packed_tokens = 0;         ///< that, rounded up to 32: the stride of keys
  const float* queries = nullptr;  ///< [items, query_heads, tokens, head_dim]
  const float* keys = nullptr;     ///< [items, kv_heads, packed_tokens / 32, head_dim, 32], see pack_keys
  const float* scales = nullptr;   ///< [items] factor of a logit
};

/// Keys of one item, [kv_heads, tokens, head_dim], to [kv_heads, packed_tokens / 32, head_dim, 32]: lanes of
/// a warp that hold neighbouring keys then read neighbouring numbers. Missing keys become 0.
void pack_keys(const float* keys, Index kv_heads, Index tokens, Index head_dim, Index packed_tokens,
               float* packed, Stream stream);

/// Bytes of work space that the operations below need.
Index row_workspace_bytes(Index active_rows);

/// The canonical weights of every row (docs/arithmetic.md), and their sums:
///
///   z_j = scale · q . k_j      w_j = exp(z_j - max z over the keys that the mask allows)
///
/// A logit that is not finite gives w_j = +0, counts in no maximum, and sets is_bad of its item.
///
/// order      a logit: dimensions ascending, fused; a sum: 32 partial sums by position, then the tree
/// workspace  row_workspace_bytes(block.active_rows())
/// is_bad     [items] 1 where a logit was not finite; left as it is elsewhere
void form_weights(const RowBlock& block, const QueriesAndKeys& from, void* workspace, std::uint8_t* is_bad,
                  Stream stream);

/// The sums alone, for weights that were recorded.
void sum_weights(const RowBlock& block, void* workspace, Stream stream);

/// Canonical sums over residents, [items, query_heads, rows].
///
/// resident  [items, lanes, stride] 1 where a lane holds the token; lanes divide the query heads in order
void sum_residents(const RowBlock& block, const std::uint8_t* resident, Index lanes, Index stride,
                   void* workspace, float* sums, Stream stream);

}  // namespace hae::device
