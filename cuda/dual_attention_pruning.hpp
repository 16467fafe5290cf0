#pragma once

#include <cstdint>
#include <optional>

#include "cuda/memory.hpp"

namespace hae::device {

/// Which visual tokens DAP evicts (reference/dual_attention_pruning.hpp says what each option is).
struct PruningRule {
  enum class Kind { threshold, mass } kind = Kind::threshold;
  double r = 0;                 ///< threshold: share of A_V below which a token may go
  double eps = 0;               ///< mass: share of A_V that may be lost
  std::optional<double> alpha;  ///< a token with this much attention in one row stays
  std::optional<Index> max_evicted;
  Index sinks = 0;  ///< positions that count in A_V but are never evicted
};

/// The sums of text rows over many items, as add_text_rows leaves them. All device memory.
struct PruningSums {
  Index items = 0;
  Index stride = 0;
  Index scopes = 1;                    ///< at least one more than any item's largest scope
  const double* sums = nullptr;        ///< [items, stride] A_j
  const double* largest = nullptr;     ///< [items, stride] max_i a_ij
  const std::uint8_t* seen = nullptr;  ///< [items, stride] whether a text row sees the token
  const Index* scope = nullptr;  ///< [items, stride] what A_V a visual prompt token counts in; -1 for others
};

Index pruning_workspace_bytes(Index items, Index stride, Index scopes);

/// The pruning decision of every item, HAE Eq. (1)-(3), arXiv 2602.02197. Over the candidates V, visual
/// prompt tokens that a text row sees, A_V = Σ_{j in V} A_j in each scope:
///
///   threshold  evict j  iff  A_j < r A_V  and  max_i a_ij < alpha                 (both strict)
///   mass       evict in the order of (A_j, position) while their sum stays ≤ eps A_V
///
/// and of all of these at most max_evicted, the lowest first.
///
/// evicted    [items, stride] 1 for a token that goes, 0 for others
/// order      A_V: tokens ascending; the running sum: in the order of eviction; both in double
/// workspace  pruning_workspace_bytes(items, stride, scopes)
void choose_pruned(const PruningSums& sums, const PruningRule& rule, void* workspace, std::uint8_t* evicted,
                   Stream stream);

}  // namespace hae::device
