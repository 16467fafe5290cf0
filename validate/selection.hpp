#pragma once

#include <vector>

#include "validate/operation.hpp"

namespace hae::validate {

/// One lane's tokens, as a selection sees them.
struct Lane {
  std::vector<double> scores;     ///< [slots]
  std::vector<double> bounds;     ///< [slots] how far a kernel's score may be from it; 0: scores were given
  std::vector<double> positions;  ///< [slots]
  std::vector<bool> eligible;     ///< [slots] below the length too
  Index count = 0;                ///< how many to choose
};

/// The order of eviction: lower score first, then lower position; NaN below everything, all NaNs equal.
[[nodiscard]] bool goes_before(const Lane& lane, Index a, Index b);

/// The slots that a lane chooses, in the order of eviction.
[[nodiscard]] std::vector<Index> lowest(const Lane& lane);

/// Verdicts on what was chosen: the set, then the order, then the scores beside it. A slot may stand where
/// another should only if the two scores are closer than the sum of their bounds.
///
/// chosen         [lanes, most] the kernel's lists
/// chosen_scores  [lanes, most] what it says their scores are; null when not asked for
void judge_choices(const Problem& problem, const std::vector<Lane>& lanes, const std::vector<double>& chosen,
                   const std::vector<double>* chosen_scores, bool ordered, std::vector<Finding>& findings);

/// Suspicions about what is done with a choice that is right: its order, its scores, its indices.
[[nodiscard]] std::vector<Suspicion> choice_suspicions(std::vector<Lane> (*lanes_of)(const Problem&));

}  // namespace hae::validate
