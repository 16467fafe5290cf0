#include "sim/row_rule.hpp"

#include <cmath>

namespace hae {

std::optional<RowViolation> find_row_violation(std::span<const float> row, std::span<const Range> visible,
                                               std::optional<double> tolerance) {
  using Kind = RowViolation::Kind;
  double sum = 0.0;
  auto range = visible.begin();
  for (Index key = 0; key < static_cast<Index>(row.size()); ++key) {
    const float weight = row[static_cast<std::size_t>(key)];
    if (!std::isfinite(weight)) {
      return RowViolation{Kind::not_finite, key};
    }
    if (weight < 0.0f) {
      return RowViolation{Kind::negative, key};
    }
    while (range != visible.end() && range->end <= key) {
      ++range;
    }
    const bool allowed = range != visible.end() && range->begin <= key;
    if (!allowed && weight != 0.0f) {
      return RowViolation{Kind::forbidden, key};
    }
    sum += static_cast<double>(weight);
  }
  const bool is_masked = sum == 0.0;  // No weight is negative, so all of them are zero.
  if (tolerance && !is_masked && !(std::abs(sum - 1.0) <= *tolerance)) {
    return RowViolation{Kind::sum, 0, sum};
  }
  return std::nullopt;
}

}  // namespace hae
