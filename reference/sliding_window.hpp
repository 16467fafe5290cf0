#pragma once

#include <memory>
#include <optional>
#include <string>

#include "sim/policy.hpp"

namespace hae::reference {

/// Keeps the sinks and the newest `recent` residents of every lane.
Decision leave_window(const LayerCache& cache, Index layer, const Limits& limits);

/// The same after every step.
class WindowDecode final : public LayerDecode {
 public:
  explicit WindowDecode(const Limits& limits) : limits_(limits) {}

  Decision step(const Rows& row, const LayerCache& cache) override {
    return leave_window(cache, row.layer(), limits_);
  }

 private:
  Limits limits_;
};

/// What a lane holds whose budget exceeds the sliding window W > 0 of its layer, whatever its policy: the
/// sinks, and the newest W tokens, or W - 1 beside sinks. A row sees itself and W - 1 tokens before it, so
/// this loses nothing.
///
/// budget   of all `lanes` of the layer together, which may share it
/// returns  of each lane; none where the budget holds no more than that
std::optional<Limits> capped_at_window(const Limits& limits, Index budget, Index lanes, Index window);

/// What a run says of a layer whose budget is capped.
std::string capping_warning(const SequenceInfo& info, Index layer, Index held);

/// The run, with the budgets of its layers capped at their sliding windows: where one is, the run is told of
/// the rows as ever, and of what it decides at the fit and after it nothing is done.
///
/// info  must outlive what is returned
std::unique_ptr<Run> cap_at_windows(std::unique_ptr<Run> run, LaneKind lanes, const SequenceInfo& info);

}  // namespace hae::reference
