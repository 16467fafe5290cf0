#pragma once

#include "cuda/lane_cache.hpp"
#include "cuda/layer_batch.hpp"
#include "cuda/layer_job.hpp"
#include "cuda/token_scores.hpp"

namespace hae::device {

/// Evictions by rank of layers that are on the device together, all their lanes side by side: the prompt's
/// rows, the fit to the budget, and the decode steps.
class EvictionPass {
 public:
  /// Device memory for each token of a layer.
  static Index bytes_per_token(const PolicyRun& policy, const SequenceInfo& info);

  /// policy  what all layers run; must outlive the pass
  EvictionPass(const PolicyRun& policy, const std::vector<LayerJob>& layers, LayerBatch& batch,
               Stream stream);

  /// Adds the evictions to the log of each run.
  void run();

 private:
  /// What the host knows of a lane: its sizes, from which follows how many tokens a step takes.
  struct Lane {
    Limits limits;
    Index residents = 0;
    Index pending = 0;
    Index steps = 0;
  };

  /// What a lane does in one step.
  struct Taken {
    Index count = 0;       ///< tokens to choose
    bool empties = false;  ///< whether the bin is emptied
  };

  /// What the lanes do in one step.
  struct StepPlan {
    Index most = 0;        ///< largest count
    bool empties = false;  ///< whether some bin is emptied
  };

  [[nodiscard]] Index lanes() const { return std::ssize(lanes_); }
  void begin();
  void observe_prompt();
  void leave_pruned();
  void fit();
  void decode();
  void step(Index step, Index row, RowBlock block, const StepPlan& plan);
  StepPlan plan_step(Index step, std::vector<Index>& joins, std::vector<Index>& counts,
                     std::vector<std::uint8_t>& is_full);
  Taken take(Lane& lane) const;
  void add(RowBlock block);
  void draw();
  void choose(const Index* newest, const Index* counts, Index most);
  [[nodiscard]] const double* logged_scores() const;
  void read_log();

  const std::vector<LayerJob>& layers_;
  LayerBatch& batch_;
  Stream stream_;
  const PolicyRun& policy_;
  Index lanes_of_layer_;
  Index stride_;
  std::vector<Lane> lanes_;  ///< [layers, lanes of a layer]

  Array<std::uint8_t> resident_;
  Array<Index> pending_since_;
  Array<Index> evicted_in_;
  Array<double> evicted_score_;
  LaneCache cache_;
  Array<double> scores_;        ///< [lanes, stride] sums; of last_rows: pooled
  Array<double> ranking_;       ///< [lanes, stride] where scores are divided by exposures
  Array<double> head_sums_;     ///< [items, query_heads, stride] of last_rows
  Array<Index> exposures_;      ///< [items, stride] where they are counted
  Array<std::uint64_t> draws_;  ///< [lanes, stride]
  Array<std::uint8_t> eligible_;
  Array<Index> sinks_;
  Array<Index> recent_;
  Array<Index> recent_begin_;
  Array<Index> joins_;           ///< [rows, lanes] of a block of steps
  Array<Index> counts_;          ///< [rows, lanes]
  Array<std::uint8_t> is_full_;  ///< [rows, lanes]
  Array<Index> chosen_;          ///< [lanes, stride]
  Buffer selecting_;
};

}  // namespace hae::device
