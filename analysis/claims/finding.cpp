#include "analysis/claims/finding.hpp"

#include <cmath>

namespace hae::analysis {
namespace {

/// How strongly a verdict speaks against a claim.
int weight(Verdict verdict) {
  return verdict == Verdict::fails ? 2 : verdict == Verdict::holds ? 1 : 0;
}

bool speaks_more_against(const Finding& a, const Finding& b) {
  const int difference = weight(a.verdict()) - weight(b.verdict());
  if (difference != 0) {
    return difference > 0;
  }
  const double left = a.slack() + a.rounding;
  return std::isnan(left) || left <= b.slack() + b.rounding;
}

}  // namespace

const char* name(Verdict verdict) {
  switch (verdict) {
    case Verdict::holds:
      return "holds";
    case Verdict::fails:
      return "fails";
    case Verdict::does_not_apply:
      break;
  }
  return "does not apply";
}

double Finding::slack() const {
  return relation == Relation::equal ? -std::abs(bound - measured) : bound - measured;
}

Verdict Finding::verdict() const {
  if (!applies()) {
    return Verdict::does_not_apply;
  }
  const bool is_met = relation == Relation::below ? slack() > -rounding : slack() >= -rounding;
  return is_met ? Verdict::holds : Verdict::fails;
}

Finding worse(const Finding& a, const Finding& b) {
  Finding worst = speaks_more_against(a, b) ? a : b;
  if (a.applies() == b.applies()) {
    worst.cases = a.cases + b.cases;
  }
  return worst;
}

double rounding_of(Index operations) {
  HAE_EXPECTS(0 <= operations && operations < Index{1} << 52);
  const double nu = static_cast<double>(operations) * 0x1p-53;
  // Its own two roundings are inside the factor.
  return nu / (1.0 - nu) * (1.0 + 0x1p-50);
}

}  // namespace hae::analysis
