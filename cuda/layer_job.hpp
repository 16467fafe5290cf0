#pragma once

#include <vector>

#include "cuda/replay.hpp"

namespace hae::device {

struct PrunedToken {
  Index token = 0;
  double score = 0;  ///< A_j of the layer that decided
};

/// What pruning takes from a layer.
struct PrunedLayer {
  std::vector<PrunedToken> pruned;  ///< ascending
  bool within = false;              ///< they give no row and no key in the layer's prefill
};

/// One layer of one job, and where its results go.
struct LayerJob {
  const Job* job = nullptr;
  Index layer = 0;
  PrunedLayer* pruned = nullptr;
  DeviceRun* run = nullptr;

  [[nodiscard]] bool is_capped() const { return !run->is_capped.empty() && run->is_capped[at(layer)]; }

  [[nodiscard]] const SequenceInfo& info() const { return job->sequence->info(); }
};

}  // namespace hae::device
