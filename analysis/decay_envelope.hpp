#pragma once

#include <optional>
#include <span>

#include "analysis/claims/information_loss.hpp"

namespace hae::analysis {

/// The decay that bounds observed attention, M(t) <= A (1-λ)^t for every age t, and of all that do has the
/// least R3 bound, A (1-λ) / λ: what one evicted token may still lose.
///
///   With q = 1-λ the least A is max_t M(t) q^-t, and R3's bound f(q) = max_t M(t) q^(1-t) / (1-q). In u = ln
///   q each term's logarithm, ln M(t) + (1-t) u - ln(1 - e^u), is convex, so f has one minimum. Either it is
///   the minimum of one term, at q = (t-1)/t, or two terms meet there, at consecutive corners of the upper
///   hull of the points (t, ln M(t)). Both are candidates of a closed search: nothing is iterated.
///
/// largest  [ages] M(1), M(2), ...: the most that any token received at each age; finite, not negative, at
///          most 1 where it is attention
/// returns  a decay whose attention_bound() is at least M(t) for every t: A is rounded up. None if all are 0.
///          Where only M(1) > 0 the least bound M(1) is reached by no λ < 1: λ is then the largest double
///          below 1
/// throws   ContractViolation if an argument is not as said
std::optional<Decay> decay_envelope(std::span<const double> largest);

/// The age at which observed attention exceeds a decay most, and by what factor.
struct Excess {
  Index age = 0;
  double factor = 0;  ///< M(t) / (A (1-λ)^t), above 1
};

/// returns  none where the decay bounds everything
std::optional<Excess> excess_over(const Decay& decay, std::span<const double> largest);

}  // namespace hae::analysis
