#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sim/active_run.hpp"
#include "sim/weights.hpp"

namespace hae {

/// What one layer of a running model computed in one call, for some tokens in order of position.
struct LayerRows {
  View<const float, 3> queries;  ///< [query_heads, rows, head_dim] after rotary embedding
  View<const float, 3> keys;     ///< [kv_heads, rows, head_dim] after rotary embedding
  View<const float, 3> values;   ///< [kv_heads, rows, head_dim]
};

/// Closed loop: one policy decides while a model runs, and the model's next queries, keys and values are
/// those of the run with evictions. The model tells each layer's new rows and evicts what the policy decided;
/// the policy, its checks, its scores and its log are those of the open loop (sim/replay.hpp).
///
/// A copy of every key and value is kept here, evicted ones too. So a row has its weights over all keys, and
/// the run is measured like any other, against what the same queries would have given to what is gone. Scores
/// have the bits that a replay would give them for the same queries and keys. A token that was pruned within
/// a layer's prefill has no key there, so it is in none of that layer's rows: the evictions within a prefill
/// are in the log and in no metric.
///
/// Order: prefill(0), .., prefill(layers - 1); then step of every layer, in any order of layers, each layer's
/// steps ascending. A decision acts after the row it was taken on.
class ClosedLoop {
 public:
  /// info    of the sequence to come, payload qkv: the prompt, and as many tokens as it may grow to
  /// where   begins the message of an error, e.g. `board-reader: sequence 'board 3'`
  /// throws  TraceError for an info that contradicts itself; ConfigError for an option that is impossible
  /// here; NeedsError for a policy that needs embedding similarities
  ClosedLoop(SequenceInfo info, std::shared_ptr<const Policy> policy, NanRule nan, std::string where);
  ClosedLoop(const ClosedLoop&) = delete;  // its parts refer to each other
  ClosedLoop& operator=(const ClosedLoop&) = delete;
  ~ClosedLoop();

  [[nodiscard]] const SequenceInfo& info() const { return info_; }

  /// Prompt positions that leave within the layer's prefill, ascending: they give no row and no key there.
  /// Known when the prefills of all layers before are over.
  [[nodiscard]] std::span<const Index> absent(Index layer) const;

  /// One layer's prefill: rows of all prompt tokens that are not absent.
  ///
  /// throws  ContractViolation when it is another layer's turn, or the rows are others; TraceError for a
  /// number
  ///         that is not finite
  void prefill(Index layer, const LayerRows& rows);

  /// One decode step of one layer: one row.
  ///
  /// throws  as prefill, also after finish; ConfigError when the sequence outgrows info().tokens
  void step(Index layer, const LayerRows& row);

  /// The layer's cache; its prefill is over.
  [[nodiscard]] const LayerCache& cache(Index layer) const;

  /// How many tokens the layer's lanes lack: it grows when something was evicted, and only then.
  [[nodiscard]] Index missing(Index layer) const;

  /// What ran so far. `info` covers the steps that every layer made.
  struct Finished {
    SequenceInfo info;
    RunResult result;
  };

  /// Ends the run. throws ContractViolation when the prefill is not over, or layers made different numbers of
  /// steps
  Finished finish();

 private:
  class Layer;  ///< one layer's keys and values so far, and what forms its rows

  void take(const LayerRows& rows, Index layer, const std::vector<Index>& positions);
  void check_finite(const View<const float, 3>& vectors, const char* what, Index layer,
                    const std::vector<Index>& positions) const;
  void observe_prompt(Index layer, const std::vector<Index>& positions);
  [[noreturn]] void refuse(const std::string& complaint) const;
  void refuse_if_finished() const;

  SequenceInfo info_;
  std::string where_;
  NanRule nan_;
  ActiveRun run_;
  std::vector<std::unique_ptr<Layer>> layers_;  ///< [layers begun so far]
  std::vector<Index> steps_;                    ///< [layers] decode steps made
  bool finished_ = false;
};

}  // namespace hae
