#pragma once

#include <map>
#include <utility>
#include <vector>

#include "analysis/claims/information_loss.hpp"
#include "analysis/decode_walk.hpp"

namespace hae::analysis {

/// What the evicted tokens of one layer would still have received: a_j(s + t) of a token j that left after
/// step s, at age t >= 1, is the mean over its lane's query heads of its full-cache attention in decode row
/// s + t. Of everything only the largest is kept, since a bound holds for all if it holds for that.
struct ForegoneAttention {
  Index evictions = 0;
  Index flushes = 0;                ///< sets of tokens that left a lane after the same step
  std::vector<double> largest;      ///< [steps] by t - 1: the largest a_j(s + t)
  std::vector<double> largest_sum;  ///< [steps] by k - 1: the largest Σ_{t=1..k} a_j(s + t) of one token
  std::map<std::pair<Index, Index>, double> by_flush;  ///< (c, t): the largest Σ_j a_j(s + t) of c that left
  std::map<Index, double> by_future;  ///< c: the largest Σ_t Σ_j a_j(s + t) of c that left together

  /// Of several layers, or sequences, together.
  ForegoneAttention& operator+=(const ForegoneAttention& other);
};

/// Collects it. Heads ascending, then tokens ascending, then rows ascending, in double.
class ForegoneAttentionVisitor final : public DecodeVisitor {
 public:
  ForegoneAttentionVisitor(const SequenceInfo& info, LaneKind lanes);
  ~ForegoneAttentionVisitor() override;

  void begin_layer(Index layer, std::span<const LogEntry> evicted) override;
  void row(const DecodeRow& row) override;

  /// [layers], when the walk is over.
  [[nodiscard]] std::vector<ForegoneAttention> take();

 private:
  class Layer;

  const SequenceInfo& info_;
  LaneKind lanes_;
  std::vector<Layer> layers_;
};

/// R1, R2 and R3 against what was observed, each where it comes nearest to its bound. A claim does not apply
/// where the decay does not bound the attention.
struct DecayFindings {
  Finding summed_loss;  ///< R1: of one token, at ages 1 .. k; cases: evictions
  Finding flush_loss;   ///< R2: of tokens that left together, at one age; cases: flushes
  Finding future_loss;  ///< R3: of tokens that left together, at all ages in the trace; cases: flushes
};
DecayFindings decay_findings(const Decay& decay, const ForegoneAttention& observed);

}  // namespace hae::analysis
