#include "reference/sliding_window.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "reference/keep_everything.hpp"
#include "reference/selection.hpp"

namespace hae::reference {
namespace {

class CappedRun final : public Run {
 public:
  CappedRun(std::unique_ptr<Run> run, LaneKind lanes, const SequenceInfo& info)
      : run_(std::move(run)), lanes_(lane_count(info, lanes)), info_(info), capped_(at(info.layers)) {}

  void begin_layer(Index layer, const LayerVectors& vectors) override { run_->begin_layer(layer, vectors); }
  void observe(const Rows& rows) override { run_->observe(rows); }
  Decision prune(Index layer, const LayerCache& cache) override { return run_->prune(layer, cache); }

  Decision fit(Index layer, const LayerCache& cache) override {
    Decision written = run_->fit(layer, cache);
    const std::optional<Index> budget = layer_budget(layer);
    const Index window = info_.masks[at(layer)].window;
    if (!budget || window == 0) {
      return written;
    }
    capped_[at(layer)] = capped_at_window(run_->limits(layer, 0), *budget, lanes_, window);
    const std::optional<Limits>& limits = capped_[at(layer)];
    if (!limits) {
      return written;
    }
    Decision decision = leave_window(cache, layer, *limits);
    decision.warnings = std::move(written.warnings);
    decision.warnings.push_back(capping_warning(info_, layer, *limits->budget));
    return decision;
  }

  Decision balance(const std::vector<LayerCache>& caches) override { return run_->balance(caches); }

  std::unique_ptr<LayerDecode> decode(Index layer) override {
    const std::optional<Limits>& limits = capped_[at(layer)];
    if (!limits) {
      return run_->decode(layer);
    }
    if (limits->grows) {
      return std::make_unique<KeepEverything>();
    }
    return std::make_unique<WindowDecode>(*limits);
  }

  [[nodiscard]] Limits limits(Index layer, Index lane) const override {
    return capped_[at(layer)] ? *capped_[at(layer)] : run_->limits(layer, lane);
  }

 private:
  /// Of all lanes together; none where they have none.
  [[nodiscard]] std::optional<Index> layer_budget(Index layer) const {
    Index total = 0;
    for (Index lane = 0; lane < lanes_; ++lane) {
      const std::optional<Index> budget = run_->limits(layer, lane).budget;
      if (!budget) {
        return std::nullopt;
      }
      total += *budget;
    }
    return total;
  }

  std::unique_ptr<Run> run_;
  Index lanes_;
  const SequenceInfo& info_;
  std::vector<std::optional<Limits>> capped_;  ///< [layers] set by the fit
};

}  // namespace

Decision leave_window(const LayerCache& cache, Index layer, const Limits& limits) {
  Decision decision;
  for (Index lane = 0; lane < cache.lanes(); ++lane) {
    for (const Index token : eligible(cache, lane, limits.sinks, limits.recent)) {
      decision.evict.push_back({layer, lane, token, std::nullopt});
    }
  }
  return decision;
}

std::string capping_warning(const SequenceInfo& info, Index layer, Index held) {
  return "layer " + std::to_string(layer) + ": the budget is capped at " + std::to_string(held) +
         ", since no row sees beyond the layer's window of " + std::to_string(info.masks[at(layer)].window);
}

std::optional<Limits> capped_at_window(const Limits& limits, Index budget, Index lanes, Index window) {
  // A sink takes the place of the one token that a later row would not see.
  const Index recent = window - std::min<Index>(limits.sinks, 1);
  const Index held = limits.sinks + recent;
  if (budget <= held * lanes) {
    return std::nullopt;
  }
  return Limits{
      .sinks = limits.sinks, .recent = recent, .budget = held, .capacity = held, .grows = limits.grows};
}

std::unique_ptr<Run> cap_at_windows(std::unique_ptr<Run> run, LaneKind lanes, const SequenceInfo& info) {
  const bool has_windows = std::ranges::any_of(info.masks, [](const MaskRule& m) { return m.window > 0; });
  return has_windows ? std::make_unique<CappedRun>(std::move(run), lanes, info) : std::move(run);
}

}  // namespace hae::reference
