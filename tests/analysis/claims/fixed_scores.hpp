#pragma once

#include <algorithm>
#include <set>
#include <vector>

#include "sim/view.hpp"

namespace hae::testing {

/// Eviction when a token's score never changes: the model behind G2 and G3. Tokens are numbered by
/// arrival, the first `prompt` are there at the start, then one arrives a step. Nothing is protected.
struct FixedScores {
  std::vector<Index> scores;  ///< [tokens]
  Index prompt = 0;

  [[nodiscard]] Index steps() const { return static_cast<Index>(scores.size()) - prompt; }

  /// The one order: lower score first, of equal ones the older.
  [[nodiscard]] Index lowest(const std::set<Index>& tokens) const {
    return *std::ranges::min_element(tokens, {}, [&](Index j) { return std::pair(scores[at(j)], j); });
  }

  /// [steps + 1] what greedy with this budget keeps: after the prefill, then after each step.
  [[nodiscard]] std::vector<std::set<Index>> greedy(Index budget) const {
    std::vector<std::set<Index>> kept;
    std::set<Index> cache;
    for (Index token = 0; token < static_cast<Index>(scores.size()); ++token) {
      cache.insert(token);
      while (token + 1 >= prompt && static_cast<Index>(cache.size()) > budget) {
        cache.erase(lowest(cache));
      }
      if (token + 1 >= prompt) {
        kept.push_back(cache);
      }
    }
    if (prompt == 0) {
      kept.insert(kept.begin(), std::set<Index>{});
    }
    return kept;
  }

  /// The same for DDES with marks: budget l, bin D.
  [[nodiscard]] std::vector<std::set<Index>> bin(Index budget, Index capacity) const {
    std::set<Index> unmarked;
    std::set<Index> pending;
    for (Index token = 0; token < prompt; ++token) {
      unmarked.insert(token);
    }
    while (static_cast<Index>(unmarked.size()) > budget) {
      unmarked.erase(lowest(unmarked));
    }
    std::vector<std::set<Index>> kept{unmarked};
    for (Index token = prompt; token < static_cast<Index>(scores.size()); ++token) {
      unmarked.insert(token);
      if (static_cast<Index>(unmarked.size()) > budget) {
        const Index marked = lowest(unmarked);
        unmarked.erase(marked);
        pending.insert(marked);
      }
      if (static_cast<Index>(pending.size()) == capacity) {
        pending.clear();
      }
      std::set<Index>& all = kept.emplace_back(unmarked);
      all.insert(pending.begin(), pending.end());
    }
    return kept;
  }
};

}  // namespace hae::testing
