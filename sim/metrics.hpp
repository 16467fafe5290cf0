#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "sim/log.hpp"
#include "sim/policy.hpp"
#include "sim/trace.hpp"

namespace hae {

/// What is measured of every (layer, query head, row): with E the evicted and S the resident tokens of the
/// lane, on the full-cache weights w,
///
///   missed mass            m = double(Σ_E w) / double(Σ_all w), at most 1
///   KL                     -ln(double(Σ_S w) / double(Σ_all w)) = KL(a'||a), +0 when E is empty
///   output error           ‖o - o'‖₂, o = Σ a_j v_j, o' = Σ_S a'_j v_j, in double; needs V
///   relative output error  ‖o - o'‖₂ / ‖o‖₂
///   missed pull            Σ_E pull_j², pull_j = a_j ‖v_j - o‖₂, squared units of V; needs V. A token's pull
///   is
///                          how far it alone draws the output: without it o moves by pull_j / (1 - a_j)
///
/// The missed pull's order, in double: ‖v_j - o‖² as in kernels::squared_pulls; times a_j², which is exact;
/// then the sum over E ascends by position.
enum class Metric { missed_mass, missed_pull, kl, output_error, output_error_relative };
inline constexpr std::array kMetrics = {Metric::missed_mass, Metric::missed_pull, Metric::kl,
                                        Metric::output_error, Metric::output_error_relative};
const char* name(Metric metric);

/// One metric of every (layer, query head, row) of a population. NaN marks a row that is not in the metric's
/// population: masked, removed all mass (KL and output errors), ‖o‖ = 0 (relative error), no V, or not
/// replayed.
struct Series {
  Index layers = 0;
  Index query_heads = 0;
  Index rows = 0;
  std::array<std::vector<double>, kMetrics.size()> values;

  Series() = default;
  Series(Index layers, Index query_heads, Index rows);

  [[nodiscard]] double& at(Metric metric, Index layer, Index head, Index row);
  [[nodiscard]] std::span<const double> layer(Metric metric, Index layer) const;
  [[nodiscard]] std::span<const double> all(Metric metric) const;
};

/// Mean (added in the order given), maximum, and percentiles by nearest rank ⌈np/100⌉.
struct Summary {
  double mean = 0;
  double max = 0;
  double p50 = 0;
  double p95 = 0;
};

/// None when the population is empty. NaN entries are not in it.
std::optional<Summary> summarise(std::span<const double> values);

/// Everything one run over one sequence leaves behind.
struct RunResult {
  EvictionLog log;
  LaneKind lanes = LaneKind::layer;
  bool merges = false;         ///< then there are only output errors: no masses, no KL, no bounds
  std::vector<Limits> limits;  ///< [layers, lanes]
  Series decode;               ///< rows: decode steps
  Series prefill;              ///< rows: prompt positions; only layers where something acts within

  /// [layers, query_heads, steps] missed mass of the best set of the row's size: with n the smaller of the
  /// lane's residents and the keys the mask allows, the mass outside the n largest probabilities of the row.
  /// A bound on every eviction that leaves as many tokens, whether or not evicted tokens may return. NaN
  /// where the row is masked.
  std::vector<double> top_now;

  Index prefill_tokens = 0;  ///< residents at the end of each layer's prefill attention, all lanes and layers
  std::vector<Index> attention_tokens;  ///< [layers, lanes, steps] residents at attention time
  std::vector<Index> final_tokens;      ///< [layers, lanes] residents after the last step
  Index moved = 0;                      ///< residents that a compaction would move, over all evicting events
  Index removed_all_rows = 0;           ///< rows that had mass and lost all of it
  Index masked_rows = 0;                ///< rows of the trace that attend to nothing, over the whole trace
  Index lowered_weights = 0;            ///< NaN and infinite weights that counted as +0
  std::vector<std::string> warnings;
};

/// Residents at attention time, and what they cost.
struct Tokens {
  std::optional<double> mean;  ///< over lanes and decode steps
  std::optional<Index> peak;   ///< over single lanes and steps
  double final = 0;            ///< mean over lanes after the last step
};
struct Bytes {
  std::optional<double> mean;  ///< sum over lanes, mean over decode steps
  std::optional<Index> peak;   ///< peak of the sum over lanes
  Index final = 0;
  Index prefill = 0;
};

/// What a token is: of a picture, text of the prompt before its first visual token, any other text of the
/// prompt (all of it where the prompt has no picture), or a token after the prompt.
enum class TokenKind { visual, text_before, text_after, generated };
inline constexpr std::array kTokenKinds = {TokenKind::visual, TokenKind::text_before, TokenKind::text_after,
                                           TokenKind::generated};
const char* name(TokenKind kind);

/// One value a kind, in the order of kTokenKinds.
template <typename Value>
using ByKind = std::array<Value, kTokenKinds.size()>;

/// [T]
std::vector<TokenKind> token_kinds(const SequenceInfo& info);

/// Log entries by the kind of their token. A token counts once for each lane it left.
ByKind<Index> count_evicted_kinds(const SequenceInfo& info, const EvictionLog& log);

/// Of the tokens of each kind, counted once for each lane, the share that is resident after the last step,
/// pending ones included; none for a kind that the sequence does not have.
ByKind<std::optional<double>> kept_kinds(const SequenceInfo& info, const RunResult& run);

/// How alike the tokens are that runs of one sequence hold after the last step: the mean of the Jaccard index
/// |A ∩ B| / |A ∪ B|, 1 for two empty sets, over layers; and over KV heads where a lane of either run is one,
/// the other's layer then standing for each of its KV heads. Added by layers, then KV heads, ascending.
///
/// returns  [runs][runs], symmetric, 1 on the diagonal
std::vector<std::vector<double>> kept_overlap(const SequenceInfo& info, std::span<const RunResult> runs);

/// Sum of missed mass over layers, heads and rows, in this order.
double missed_mass_total(const Series& series);

/// Distinct (step, layer, lane) of a log.
Index count_events(const EvictionLog& log);

/// Residents that a compaction moves: those above the lowest evicted position, once per (step, layer, lane).
/// What was evicted within the prefill is an event of its own there: it moves rows of the prompt, not of the
/// cache.
Index count_moved(const SequenceInfo& info, const EvictionLog& log);

/// Residents at attention time, summed over lanes and decode steps: an exact total.
Index total_attention_tokens(const RunResult& run);

/// Residents at the attention of each decode step, summed over layers and lanes. [steps]
std::vector<Index> attention_tokens_by_step(const SequenceInfo& info, const RunResult& run);

Tokens count_tokens(const SequenceInfo& info, const RunResult& run);

/// Bytes of one token in one lane: 2 * head_dim * element bytes * KV heads of the lane; none when the trace
/// does not say.
std::optional<Index> lane_token_bytes(const SequenceInfo& info, const RunResult& run);

/// tokens * lane_token_bytes; none when the trace does not say.
std::optional<Bytes> count_bytes(const SequenceInfo& info, const RunResult& run);

/// Whether a run's mean bytes differ from those of `first` by more than max(1 %, one token a lane), compared
/// as integer totals over the decode steps. Without bytes, tokens are compared, which is the same.
bool unequal_bytes(const SequenceInfo& info, const RunResult& first, const RunResult& run);

}  // namespace hae
