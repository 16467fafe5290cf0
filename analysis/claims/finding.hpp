#pragma once

#include <string>

#include "sim/view.hpp"

namespace hae::analysis {

/// What became of a claim where it was looked at.
enum class Verdict {
  holds,
  fails,           ///< of a proved claim: a bug in us or in the mathematics
  does_not_apply,  ///< an assumption is not met; what was measured says nothing about the claim
};
const char* name(Verdict verdict);

/// One evaluation of a claim on numbers that were observed.
///
/// Every claim is put as a measured number against a bound: `measured <= bound`, `measured < bound`, or
/// `measured = bound` for an identity. Claims about sets and events count violations, with bound 0.
/// `rounding` is a computed bound on what floating point can have added to the difference of the two: not a
/// tolerance, and 0 where the arithmetic is monotone or exact. Measured and bound are given also where an
/// assumption is not met, if they can be formed.
struct Finding {
  enum class Relation { at_most, below, equal };

  std::string unmet;  ///< the first assumption that is not met, one sentence; empty: the claim applies
  Relation relation = Relation::at_most;
  double measured = 0;
  double bound = 0;
  double rounding = 0;
  Index cases = 0;  ///< rows, tokens or events looked at

  [[nodiscard]] bool applies() const { return unmet.empty(); }

  /// What is left: bound - measured, or -|bound - measured| for an identity.
  [[nodiscard]] double slack() const;

  /// Of a claim that applies: holds if slack() >= -rounding (below: slack() > -rounding); a NaN fails.
  [[nodiscard]] Verdict verdict() const;
  [[nodiscard]] bool holds() const { return verdict() == Verdict::holds; }
};

/// Of two findings of one claim the one that speaks more against it: one that fails, else one that applies,
/// else the one with less slack beyond its rounding. Cases add up where both apply, or neither does. So the
/// worst of many rows is a finding about all of them.
Finding worse(const Finding& a, const Finding& b);

/// The error that n roundings to nearest in double add to a number, relatively: n u / (1 - n u), u = 2^-53
/// (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., Lemma 3.1). Needs n u < 1.
double rounding_of(Index operations);

/// The same for a canonical float32 sum of n numbers >= 0: n/32 additions in a partial sum, 5 in the tree
/// (sim/arithmetic.hpp), u = 2^-24, and two more for what products of errors add.
constexpr double canonical_rounding_of(Index keys) {
  return static_cast<double>(keys / 32 + 7) * 0x1p-24;
}

}  // namespace hae::analysis
