#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sim/metrics.hpp"
#include "sim/policy.hpp"
#include "sim/row_meter.hpp"

namespace hae {

/// What one part of a run writes down: the prefill, or the decoding of one layer. Parts write at the same
/// time, each into its own.
struct Ledger {
  std::vector<LogEntry> entries;
  std::vector<std::string> warnings;
  Index removed_all_rows = 0;
  Index masked_rows = 0;
  Index lowered_weights = 0;
};

/// Everything the engine keeps of one policy's run over one sequence, and the moments at which the policy
/// decides. Whoever drives it, a recorded sequence (sim/replay.hpp) or a running model (sim/closed_loop.hpp),
/// forms the rows and lets the policy observe them; for each layer in order
///
///   begin_layer, show_vectors, observe the prompt's rows, end_layer_prefill; then end_prefill; and for each
///   step and layer: join, observe the step's row, decide
struct ActiveRun {
  ActiveRun(std::shared_ptr<const Policy> run_policy, const SequenceInfo& sequence_info);

  /// Makes the layer's cache: every prompt token but those that left within its prefill.
  void begin_layer(Index layer);

  /// Shows the layer's vectors to a policy, as far as it asked for them. They stay valid until
  /// end_layer_prefill.
  void show_vectors(Index layer, LayerPayload& payload);

  /// After the layer's last prompt row: what waited for the end of its prefill, prune, fit.
  void end_layer_prefill(Index layer);

  /// After the last layer's prefill: decides what spans layers, holds the policy to its limits, and makes the
  /// layers' decode states.
  void end_prefill();

  /// The token of a decode step joins the layer's lanes; their sizes are written down.
  void join(Index layer, Index step);

  /// Writes the measurements of a row down, before the policy decides on it: of a run that merges, the output
  /// errors alone, without top_now.
  void store_prompt_row(std::span<const RowMeter::Measured> measured, Index layer, Index position);
  void store_decode_row(std::span<const RowMeter::Measured> measured, std::span<const double> top_now,
                        Index layer, Index step);

  /// Checks and applies what the policy decided after observing the step's row.
  void apply(const Decision& decision, Index layer, Index step);

  /// Brings the parts of the run together, in the order of layers. Nothing runs after it.
  ///
  /// steps  decode steps that ran, at most info.steps(): the result covers them
  RunResult finish(Index steps);

  std::shared_ptr<const Policy> policy;
  const SequenceInfo& info;
  std::unique_ptr<Run> state;
  std::vector<LayerCache> caches;          ///< [layers begun so far]
  std::vector<std::vector<Index>> within;  ///< [layers] prompt tokens that give no row and no key, ascending
  std::vector<std::vector<Evict>> merged;  ///< [layers] evictions whose keys and values went into others
  std::vector<std::vector<Evict>> after;  ///< [layers] evictions that wait for the end of the layer's prefill
  std::vector<std::unique_ptr<LayerDecode>> decoding;  ///< [layers] since end_prefill
  std::vector<float> unrotated_queries;  ///< of the layer in its prefill, for a policy that needs them
  Ledger prefill;
  std::vector<Ledger> decode;  ///< [layers]
  RunResult result;            ///< result.limits is set when the prefill is over

  /// The lane's limits: what the policy says until the prefill is over, and what it said then.
  [[nodiscard]] Limits limits(Index layer, Index lane) const;
};

/// The lane of a cache as the log names it.
inline Index logged_lane(LaneKind kind, Index lane) {
  return kind == LaneKind::layer ? kLayerLane : lane;
}

/// The canonical arithmetic needs the processor's default mode; a host program, or a library beside us, may
/// have changed it.
///
/// throws  ContractViolation when floating point does not round to nearest with gradual underflow
void check_floating_point_mode();

}  // namespace hae
