#pragma once

#include <memory>
#include <optional>

#include "analysis/claims/pruning_loss.hpp"
#include "sim/policy.hpp"

namespace hae::cli {

/// DAP as a policy's options ask for it.
struct Pruning {
  enum class Rule { threshold, mass } rule = Rule::threshold;
  analysis::PruningThresholds thresholds;
  double eps = 0;
  analysis::PruningView view;
  Index sinks = 0;
  bool mass_alone = false;               ///< dap=mass with scope=sequence, no alpha and no max_evicted
  std::shared_ptr<const Policy> policy;  ///< that prunes so, and does nothing else
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
