#include "analysis/claims/claim.hpp"

#include <algorithm>
#include <array>

#include "sim/errors.hpp"

namespace hae::analysis {
namespace {

// Assumptions that several claims share.
constexpr std::string_view kDecay =
    "Each token's attention t steps after some moment is at most A (1-λ)^t, "
    "with A > 0 and 0 < λ < 1.";
constexpr std::string_view kTokens = "c >= 1 tokens are flushed together.";
constexpr std::string_view kEpsilon = "ε > 0.";
constexpr std::string_view kRule =
    "The evicted set C was chosen by DAP with r and α in the layer that is looked at.";
constexpr std::string_view kTextRow = "The prompt has at least one text row.";
constexpr std::string_view kSomePruned = "At least one token was pruned.";
constexpr std::string_view kAttended = "Text pays attention to the visual tokens: A_V > 0.";
constexpr std::string_view kSamePair =
    "The runs differ in nothing but the bin and the budgets named: same sinks, recent, lanes and score, same "
    "evictions in the prefill; DDES marks.";
constexpr std::string_view kFull =
    "No eviction changes a score: scores are of the full-cache attention (scores=full), or fixed.";
constexpr std::string_view kFixed = "A token's score never changes after its first.";
constexpr std::string_view kUnprotected = "No token is protected: sinks and recent are 0.";
constexpr std::string_view kShortPrompt = "The prompt is within the budget l.";
constexpr std::string_view kGrows = "In each decode row attention is >= 0 and grows with the score.";
constexpr std::string_view kMass = "The row's residents have mass: m < 1.";
constexpr std::string_view kLoses = "The row misses mass: m > 0.";

constexpr std::array kPrinted{std::string_view("A > 0, 0 < λ < 1 and ε > 0."),
                              std::string_view("Premise as printed: k <= log(ε/A)/log(1-λ).")};
constexpr std::array kDecayEpsilon{kDecay, kEpsilon};
constexpr std::array kFlush{kDecay, kTokens};
constexpr std::array kFlushEpsilon{kDecay, kTokens, kEpsilon};
constexpr std::array kPruned{kRule, kTextRow, kSomePruned};
constexpr std::array kPrunedShare{
    kRule, kAttended, std::string_view("At most c tokens are pruned, and r <= ε/c, with c >= 1 and ε > 0.")};
constexpr std::array kMassRule{std::string_view("The evicted set was chosen by dap=mass with eps >= 0."),
                               kAttended};
constexpr std::array kMassAlone{
    std::string_view("The evicted set was chosen by dap=mass with eps >= 0, scope=sequence, no alpha and no "
                     "max_evicted."),
    kAttended};
constexpr std::array kPair{kSamePair};
constexpr std::array kFullPair{kSamePair, kFull};
constexpr std::array kFixedPair{kSamePair, kFixed, kUnprotected, kShortPrompt};
constexpr std::array kGrowingPair{kSamePair, kFixed, kUnprotected, kShortPrompt, kGrows};
constexpr std::array kRow{kMass};
constexpr std::array kLosingRow{kMass, kLoses};
constexpr std::array kOneToken{kMass, std::string_view("Exactly one token is evicted.")};

constexpr std::array<std::string_view, 3> kT21{"T21_refuted", "T21_premise_is_reversed",
                                               "T21_false_beyond_one"};
constexpr std::array<std::string_view, 1> kC21{"C21_is_reversed"};
constexpr std::array<std::string_view, 2> kR1{"R1_sum", "R1_threshold"};
constexpr std::array<std::string_view, 2> kR2{"R2_bound", "R2_threshold"};
constexpr std::array<std::string_view, 3> kR3{"R3_bound", "R3_supremum", "R3_threshold"};
constexpr std::array<std::string_view, 2> kColumns{"DAP_column_bound", "DAP_column_bound_needs_a_row"};
constexpr std::array<std::string_view, 1> kRows{"DAP_row_bound"};
constexpr std::array<std::string_view, 1> kShare{"DAP_share"};
constexpr std::array<std::string_view, 1> kGuarantee{"mass_guarantee"};
constexpr std::array<std::string_view, 1> kOptimal{"mass_optimal"};
constexpr std::array<std::string_view, 1> kMarks{"G1_marks_are_greedys_evictions"};
constexpr std::array<std::string_view, 1> kSubset{"G1_evicted_subset"};
constexpr std::array<std::string_view, 1> kMissed{"G1_missed_mass"};
constexpr std::array<std::string_view, 1> kKept{"G2_kept_subset"};
constexpr std::array<std::string_view, 1> kConverse{"G2_converse_refuted"};
constexpr std::array<std::string_view, 1> kBetween{"G2_mass_between"};
constexpr std::array<std::string_view, 1> kBudget{"G3_equal_budget"};
constexpr std::array<std::string_view, 1> kPeak{"G3_equal_peak"};
constexpr std::array<std::string_view, 1> kChanging{"G3_changing_scores_refuted"};
constexpr std::array<std::string_view, 1> kVariation{"total_variation_is_missed_mass"};
constexpr std::array<std::string_view, 1> kKl{"kl_is_log_of_kept_mass"};
constexpr std::array<std::string_view, 1> kOutput{"output_error_identity"};
constexpr std::array<std::string_view, 1> kDiameter{"output_error_diameter"};
constexpr std::array<std::string_view, 1> kOneTokenProof{"output_error_of_one_token"};

constexpr std::string_view kLoss = "analysis/claims/information_loss.md";
constexpr std::string_view kPruning = "analysis/claims/pruning_loss.md";
constexpr std::string_view kGreedy = "analysis/claims/against_greedy.md";
constexpr std::string_view kRenormalisation = "analysis/claims/renormalisation.md";

constexpr std::array kClaims{
    Claim{"T2.1", "Theorem 2.1 as printed", "k <= log(ε/A)/log(1-λ)  =>  Σ_{t=1..k} A (1-λ)^t < ε",
          Status::refuted, kPrinted, kT21, kLoss},
    Claim{"C2.1", "Corollary 2.1 as printed", "Σ scores at eviction under DDES <= Σ under greedy",
          Status::refuted, kPair, kC21, kGreedy},
    Claim{
        "R1", "one eviction a step",
        "Σ_{t=1..k} A (1-λ)^t = A (1-λ) (1-(1-λ)^k)/λ <= ε  <=>  k <= log(1-ελ/(A(1-λ)))/log(1-λ), any k if "
        "the argument is <= 0",
        Status::proved, kDecayEpsilon, kR1, kLoss},
    Claim{"R2", "tokens flushed together", "c A (1-λ)^k <= ε  <=>  k >= log(ε/(cA))/log(1-λ)", Status::proved,
          kFlushEpsilon, kR2, kLoss},
    Claim{"R3", "everything still to come", "Σ_{t>k} c A (1-λ)^t = c A (1-λ)^(k+1)/λ", Status::proved, kFlush,
          kR3, kLoss},
    Claim{"DAP.columns", "what pruned tokens received", "Σ_{j in C} A_j < |C| min(r A_V, α rows)",
          Status::proved, kPruned, kColumns, kPruning},
    Claim{"DAP.rows", "what pruned tokens received in one row", "Σ_{j in C} a_ij < |C| α in every text row i",
          Status::proved, kPruned, kRows, kPruning},
    Claim{"DAP.share", "the share that pruning loses", "r <= ε/c and |C| <= c  =>  Σ_{j in C} A_j / A_V < ε",
          Status::proved, kPrunedShare, kShare, kPruning},
    Claim{"MASS.guarantee", "dap=mass keeps its word", "Σ_{j in C} A_j / A_V <= eps", Status::proved,
          kMassRule, kGuarantee, kPruning},
    Claim{"MASS.optimal", "dap=mass evicts the most tokens",
          "C' spares the same sinks and Σ_{j in C'} A_j / A_V <= eps  =>  |C'| <= |C|", Status::proved,
          kMassAlone, kOptimal, kPruning},
    Claim{"G1.marks", "the bin takes what greedy evicts",
          "marked(DDES l, D; s, lane) = evicted(greedy l; s, lane) at every step s", Status::proved,
          kFullPair, kMarks, kGreedy},
    Claim{"G1.subset", "the bin evicts later",
          "E(DDES l, D; s) is a subset of E(greedy l; s) at every step s", Status::proved, kFullPair, kSubset,
          kGreedy},
    Claim{"G1.mass", "the bin misses no more mass", "m(DDES l, D) <= m(greedy l) in every decode row",
          Status::proved, kFullPair, kMissed, kGreedy},
    Claim{"G2.subset", "greedy's tokens are kept",
          "kept(greedy l; s) is a subset of kept(DDES l, D; s) at every step s", Status::proved, kFullPair,
          kKept, kGreedy},
    Claim{"G2.converse", "the other inclusion, with fixed scores",
          "kept(DDES l, D; s) is a subset of kept(greedy l+D; s) at every step s", Status::refuted,
          kFixedPair, kConverse, kGreedy},
    Claim{"G2.mass", "the mass lies between, with fixed scores",
          "mass(greedy l) <= mass(DDES l, D) <= mass(greedy l+D-1) in every decode row", Status::proved,
          kGrowingPair, kBetween, kGreedy},
    Claim{"G3.budget", "at equal budget DDES is not worse", "m(DDES l, D) <= m(greedy l) in every decode row",
          Status::proved, kFullPair, kBudget, kGreedy},
    Claim{"G3.peak", "at equal peak memory greedy is not worse",
          "m(greedy l+D-1) <= m(DDES l, D) in every decode row", Status::proved, kGrowingPair, kPeak,
          kGreedy},
    Claim{"G3.changing", "the same with scores that change",
          "m(greedy l+D-1) <= m(DDES l, D) in every decode row", Status::refuted, kFullPair, kChanging,
          kGreedy},
    Claim{"ROW.variation", "missed mass is total variation", "½ Σ_j |a_j - a'_j| = m", Status::proved, kRow,
          kVariation, kRenormalisation},
    Claim{"ROW.kl", "KL is the logarithm of the kept mass", "Σ_{j in S} a'_j ln(a'_j/a_j) = -ln(1-m)",
          Status::proved, kRow, kKl, kRenormalisation},
    Claim{"ROW.output", "the output moves between two means", "o - o' = m (v_E - v_S), means of V under a",
          Status::proved, kLosingRow, kOutput, kRenormalisation},
    Claim{"ROW.diameter", "the output moves no farther than values lie apart", "|o - o'| <= m diam(V)",
          Status::proved, kRow, kDiameter, kRenormalisation},
    Claim{"ROW.one-token", "one token alone", "|o - o'| = p/(1-p) |o - v_j|, p = a_j", Status::proved,
          kOneToken, kOneTokenProof, kRenormalisation},
};

}  // namespace

std::string_view name(Status status) {
  switch (status) {
    case Status::proved:
      return "proved";
    case Status::cited:
      return "cited";
    case Status::refuted:
      return "refuted";
    case Status::checked:
      break;
  }
  return "checked";
}

std::span<const Claim> claims() {
  return kClaims;
}

const Claim& claim(std::string_view id) {
  const auto found = std::ranges::find(kClaims, id, &Claim::id);
  HAE_EXPECTS(found != kClaims.end());
  return *found;
}

}  // namespace hae::analysis
