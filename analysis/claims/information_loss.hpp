#pragma once

#include <optional>
#include <span>

#include "analysis/claims/finding.hpp"

// What eviction loses when attention decays: the paper's Theorem 2.1 (arXiv 2602.02197), which is false, and
// what holds instead. Proofs: analysis/claims/information_loss.md.
//
// Every number is formed with 100 decimal digits and a 32-bit exponent (Boost.Multiprecision), where nothing
// in between overflows, underflows or cancels, and is rounded once, to the safe side: a bound is never below
// its formula, and at most one double above the least double that is not. So a threshold that compares bounds
// with epsilon is never optimistic; it can be one short of the real-valued one only where the loss equals
// epsilon within 2^-200 of itself. A bound that no double reaches is infinity.
//
// Arguments that are no decay, no count or no epsilon are contract violations.

namespace hae::analysis {

/// The assumption of every bound here: a token's attention t steps after some moment is at most A (1 - λ)^t.
struct Decay {
  double initial = 1;  ///< A > 0, finite
  double rate = 0.5;   ///< 0 < λ < 1
};

/// The largest attention that the decay allows at age t >= 0: A (1 - λ)^t.
double attention_bound(const Decay& decay, Index age);

/// The premise of T2.1 as printed: k <= log(ε/A)/log(1-λ). It says A (1 - λ)^k >= ε: that the evicted token
/// still matters.
///
/// epsilon  > 0
/// k        >= 0
bool printed_premise(const Decay& decay, double epsilon, Index k);

/// T2.1 as printed, *refuted*: if the premise holds, Σ_{t=1..k} A (1-λ)^t < ε.
///
/// returns  measured: the sum, rounded down; bound: epsilon; does not apply where the premise is not met. It
///          fails for every k >= 1 that meets the premise (with <= for every k >= 2)
Finding printed_theorem(const Decay& decay, double epsilon, Index k);

/// R1: one eviction a step, ages 1 .. k, loses at most
///
///   Σ_{t=1..k} A (1-λ)^t = A (1-λ) (1 - (1-λ)^k) / λ
///
/// k  >= 0
double summed_loss_bound(const Decay& decay, Index k);

/// R1's threshold: the largest k with summed_loss_bound(decay, k) <= epsilon, in exact arithmetic
///
///   k <= log(1 - ελ/(A (1-λ))) / log(1-λ)
///
/// epsilon  > 0
/// returns  none if any k will do (the logarithm's argument is <= 0, or no Index is large enough)
std::optional<Index> largest_age(const Decay& decay, double epsilon);

/// R2: c tokens flushed together at age k lose at most c A (1-λ)^k at that moment. It falls with k: waiting
/// in the bin helps, which is what T2.1 has reversed.
///
/// tokens  c >= 1
/// k       >= 0
double flush_loss_bound(const Decay& decay, Index tokens, Index k);

/// R2's threshold: the least k with flush_loss_bound(decay, tokens, k) <= epsilon, in exact arithmetic
///
///   k >= log(ε/(cA)) / log(1-λ)
///
/// returns  none if no Index is large enough
std::optional<Index> least_wait(const Decay& decay, Index tokens, double epsilon);

/// R3: all that c tokens flushed at age k would still have received is at most
///
///   Σ_{t>k} c A (1-λ)^t = c A (1-λ)^{k+1} / λ
double future_loss_bound(const Decay& decay, Index tokens, Index k);

/// R3 read for the bin: the most tokens c that may be flushed together at age k so that everything they
/// would still have received stays within epsilon.
///
/// returns  0 if not even one may; the largest Index if any number may
Index largest_bin(const Decay& decay, double epsilon, Index k);

/// R1 on one token's attention at ages 1 .. k.
///
/// attention  [k] not negative; the decay must bound each, else the claim does not apply
/// returns    measured: the sum, in double, ascending; bound: summed_loss_bound; cases: k
Finding summed_loss(const Decay& decay, std::span<const double> attention);

/// R2 on the attention of tokens that are flushed at age k, at that age.
///
/// attention  [c >= 1]
Finding flush_loss(const Decay& decay, std::span<const double> attention, Index k);

/// R3 on the attention that tokens flushed at age k would have received at ages k+1 .. k+horizon.
///
/// attention  [c >= 1, horizon]
Finding future_loss(const Decay& decay, View<const double, 2> attention, Index k);

}  // namespace hae::analysis
