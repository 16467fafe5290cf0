#pragma once

#include <memory>
#include <optional>

#include "analysis/claims/pruning_loss.hpp"
#include "reference/dual_attention_pruning.hpp"
#include "sim/policy.hpp"

namespace hae::cli {

/// DAP as a policy's options ask for it.
struct Pruning {
  reference::PruningOptions options;
  Index sinks = 0;
  std::shared_ptr<const Policy> policy;  ///< that prunes so, and does nothing else

  [[nodiscard]] bool is_by_mass() const { return options.rule == reference::PruningOptions::Rule::mass; }

  /// Whether nothing but sinks spares a token from dap=mass.
  [[nodiscard]] bool is_mass_alone() const;

  [[nodiscard]] analysis::PruningView view() const;
};

/// The pruning of a policy's prefill; none where it has none.
std::optional<Pruning> pruning_of(const Policy& policy);

/// Two policies that differ in the recycle bin alone, with the scores that the theory assumes.
struct BinAgainstGreedy {
  std::shared_ptr<const Policy> bin;
  std::shared_ptr<const Policy> greedy;      ///< with the same budget
  std::shared_ptr<const Policy> own_greedy;  ///< the same with the policy's own scores; null if they are full
  bool sums = true;                          ///< score=sum

  /// `greedy` under another budget.
  [[nodiscard]] std::shared_ptr<const Policy> greedy_with(Index budget) const;
};

/// For a policy that marks tokens for a recycle bin; none for any other.
std::optional<BinAgainstGreedy> bin_against_greedy(const Policy& policy);

}  // namespace hae::cli
