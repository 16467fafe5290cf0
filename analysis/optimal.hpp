#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sim/replay.hpp"

namespace hae::analysis {

/// The most memory that the search for one layer's optimum may take, per thread: attention still to come of
/// every token at every step, and the solver's copy of it.
inline constexpr Index kMostSearchBytes = Index{1} << 30;

/// How far the missed mass of a row may be off when a measured total is compared with the bound: sums of T
/// terms in 32 partial sums and a tree of depth 5 are exact within (T/32 + 5) 2^-24, relatively; two such
/// sums make a quotient, two quotients are compared, and the search's own units add less than the rest.
constexpr double optimal_rounding(Index tokens) {
  return static_cast<double>(tokens / 32 + 8) * 0x1p-22;
}

/// The least total missed mass, over decode rows, of any eviction that leaves every lane with as many
/// residents at every step as a run had: a bound that no policy of these sizes beats, with whatever knowledge
/// of the future. Tokens never return, step 0 is chosen freely, nothing is protected, and a token may go in
/// the step it came.
///
/// For each lane the least loss is an assignment of tokens to eviction steps (least_loss.hpp), on the
/// attention that tokens would still receive from the lane's query heads. The evictions found are then
/// replayed through the engine like any log, so a total is measured, not promised. Runs whose lanes have
/// equal sizes share the search. Reads the decode steps of the sequence twice more.
///
/// Many evictions can be optimal, and each measured row is a quotient of float32 sums, so a total is defined
/// within rows * optimal_rounding(T), rows = layers * query heads * steps.
///
/// runs     results of policies over this sequence, as replay() returned them
/// returns  [runs] Σ of missed mass over (layer, query head, decode row); none where the search would take
/// more
///          than kMostSearchBytes
/// throws   as replay()
std::vector<std::optional<double>> optimal_totals(Sequence& sequence, std::span<const RunResult> runs,
                                                  const ReplayOptions& options, const std::string& where);

}  // namespace hae::analysis
