#pragma once

#include <optional>
#include <span>

#include "sim/trace.hpp"

namespace hae {

/// How a recorded attention row breaks the format: the one rule that the engine and `hae check` hold rows to.
struct RowViolation {
  enum class Kind { not_finite, negative, forbidden, sum };

  Kind kind = Kind::sum;
  Index key = 0;   ///< the offending probability; for sum: none
  double sum = 0;  ///< of the whole row, ascending, for sum
};

/// The first violation of a row: every probability finite, at least 0, and 0 where the mask forbids the key;
/// the sum 1 within the tolerance, or a row of zeros.
///
/// row        [keys] probabilities
/// visible    the keys its mask allows, ascending and disjoint
/// tolerance  none: the sum is not checked
[[nodiscard]] std::optional<RowViolation> find_row_violation(std::span<const float> row,
                                                             std::span<const Range> visible,
                                                             std::optional<double> tolerance);

}  // namespace hae
