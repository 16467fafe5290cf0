#pragma once

#include "analysis/claims/finding.hpp"
#include "sim/metrics.hpp"

// DDES against greedy eviction: what two runs over one sequence show of the paper's Corollary 2.1
// (arXiv 2602.02197), which is reversed, and of what holds instead. Proofs:
// analysis/claims/against_greedy.md.

namespace hae::analysis {

/// What logs do not tell about the scores of both runs, which are the same.
struct ScoreAssumptions {
  bool full = false;   ///< scores=full: of the full-cache attention, so that no eviction changes them
  bool sums = true;    ///< score=sum: they never fall
  bool fixed = false;  ///< a token's score never changes after its first
  bool attention_grows_with_score = false;  ///< each decode row pays more to tokens of higher score
};

/// Two runs over one sequence, the same in all but the bin: `hae` with ddes=mark, budget l and bin D, and
/// greedy.
struct Duel {
  const SequenceInfo& info;
  const RunResult& bin;
  const RunResult& greedy;
  ScoreAssumptions scores;
};

// Greedy with the bin's budget l: G1, C2.1, G2.subset, G3.budget.

/// G1.marks: at every step, in every lane, DDES marks exactly the tokens that greedy evicts. Needs scores
/// that no eviction changes, full or fixed, and budget, sinks, recent, lanes and the prefill's evictions
/// equal.
///
/// returns  measured: lanes and steps where they differ; bound 0; cases: lanes and decode steps
Finding marks_are_greedys_evictions(const Duel& duel);

/// G1.subset: at every step the set DDES has evicted is a subset of greedy's. Needs what G1.marks needs.
///
/// returns  measured: evictions of DDES that greedy makes later or never; bound 0; cases: evictions of DDES
Finding evicted_is_subset(const Duel& duel);

/// G1.mass: DDES misses no more than greedy in any decode row. Needs what G1.marks needs.
///
/// returns  measured: the largest difference of missed mass over (layer, query head, decode row), DDES less
///          greedy; bound 0; rounding 0: a canonical sum adds +0 for a key left out, in the same order, and
///          rounding is monotone, so the sum over a subset is not larger
Finding missed_mass_is_less(const Duel& duel);

/// What G1 says DDES gains: greedy's missed mass less DDES's, which is the mass of the tokens in the bin.
struct Gain {
  double total = 0;  ///< over (layer, query head, decode row), in this order
  double largest = 0;
};
Gain mass_in_bin(const Duel& duel);

/// C2.1 as printed, *refuted*: the loss of DDES is at most that of greedy, with loss the sum of scores at
/// eviction, here over the (layer, lane, token) that both evict while decoding. Applies wherever the two runs
/// differ in nothing but the bin.
Finding printed_corollary(const Duel& duel);

/// Why C2.1 fails: where scores never fall, each token that both evict has at least the score under DDES that
/// it has under greedy. Needs what G1.marks needs, and sums.
///
/// returns  measured: the largest difference of a token's score, greedy's less DDES's; bound 0; rounding 0:
///          both are the same additions of numbers >= 0, DDES's going on for longer
Finding reversed_corollary(const Duel& duel);

/// G2.subset: what greedy keeps is kept by DDES, after every step. Needs what G1.marks needs, which fixed
/// scores are a case of.
///
/// returns  measured: (layer, lane, step, token) kept by greedy and not by DDES; bound 0
Finding kept_is_superset(const Duel& duel);

/// G3.budget: at equal budget DDES misses no more than greedy in any decode row. Needs what G1.marks needs,
/// and is then G1.mass.
Finding not_worse_at_equal_budget(const Duel& duel);

// Greedy with another budget than the bin's l.

/// G2.converse, *refuted*: what DDES keeps is kept by greedy with budget l + D. Needs fixed scores, nothing
/// protected, the prompt within the budget.
///
/// returns  measured: (layer, lane, step, token) kept by DDES and not by greedy; bound 0
Finding kept_is_subset_of_larger(const Duel& duel);

/// G3.peak: at equal peak memory, greedy with budget l + D - 1, greedy misses no more than DDES in any decode
/// row. Needs what G2.converse needs, and attention that grows with the score.
///
/// returns  measured: the largest difference, greedy less DDES; bound 0; rounding: of float32 sums over
///          sets that do not contain each other
Finding greedy_not_worse_at_equal_peak(const Duel& duel);

/// G3.changing, *refuted*: the same with scores that change. Needs full scores only.
Finding greedy_not_worse_with_changing_scores(const Duel& duel);

/// G2.mass: for weights that grow with the score, mass(greedy l) <= mass(DDES l, D) <= mass(greedy l+D-1) in
/// every row. Needs what G3.peak needs.
///
/// at_budget  against greedy with budget l
/// at_peak    against greedy with budget l + D - 1
Finding mass_is_between(const Duel& at_budget, const Duel& at_peak);

}  // namespace hae::analysis
