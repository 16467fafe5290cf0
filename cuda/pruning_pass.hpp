#pragma once

#include "cuda/layer_batch.hpp"
#include "cuda/layer_job.hpp"

namespace hae::device {

/// The pruning decisions of layers that are on the device together: adds their text rows up and decides.
class PruningPass {
 public:
  /// Device memory for each token of a layer: three numbers, what is chosen, three to sort with; and flags.
  static constexpr Index kBytesPerToken = 7 * Index{sizeof(double)} + 3;

  PruningPass(const std::vector<LayerJob>& layers, LayerBatch& batch, Stream stream)
      : layers_(layers), batch_(batch), stream_(stream) {}

  /// Writes to each layer what is pruned, and to each run a report.
  void run();

 private:
  [[nodiscard]] std::vector<Index> scopes() const;
  void report(Index item, std::span<const double> sums, std::span<const std::uint8_t> seen,
              std::span<const std::uint8_t> evicted);

  const std::vector<LayerJob>& layers_;
  LayerBatch& batch_;
  Stream stream_;
};

}  // namespace hae::device
