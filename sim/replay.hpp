#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sim/metrics.hpp"
#include "sim/policy.hpp"
#include "sim/trace.hpp"
#include "sim/weights.hpp"

namespace hae {

/// Calls task(0) .. task(count - 1), in any order and on any threads, and returns when all are done. When
/// tasks throw, it throws what the one of lowest index among them threw.
using ForEach = std::function<void(Index count, const std::function<void(Index)>& task)>;

/// Runs tasks by `parallel`, or where that is empty one after another.
void for_each(const ForEach& parallel, Index count, const std::function<void(Index)>& task);

struct ReplayOptions {
  NanRule nan = NanRule::error;

  /// Runs independent layers; empty: one after another. It never changes a result.
  ForEach for_each;

  /// Without prompt rows only decode steps are read and measured: for one more reading of a sequence, by
  /// policies that need no prompt row. Masked and lowered rows are then counted over decode steps.
  bool prompt_rows = true;

  /// Query rows formed at a time; 0 chooses what keeps the working set within a few MiB. It never changes a
  /// result.
  Index block_rows = 0;

  /// Called now and then with the share of the sequence that is done, in [0, 1], by one thread at a time. It
  /// may throw to stop the replay.
  std::function<void(double)> progress;
};

/// Replays one recorded sequence through every policy in one pass: each attention row is read or recomputed
/// once for all of them (K is read for the prefill and for decoding, V where it is measured). Open loop:
/// queries, keys and values are those of the recorded full-cache run, so a row's weights are computed once
/// and an eviction acts on it only through renormalisation.
///
/// Order inside a decode step of a layer: the new token joins each lane; its row is formed over the
/// residents, itself and pending ones included; the row is measured; the policy observes it and decides; the
/// decision is checked and applied. Step 0 goes layer by layer, rows ascending: observe, then prune, then
/// fit; after the last layer, balance.
///
/// policies at least one
/// where    begins the message of an error, e.g. `trace.h5`
/// returns  one result a policy, in order
/// throws   NeedsError before anything runs, if the trace lacks what a policy needs; TraceError for a payload
/// that
///          breaks the format; ConfigError for an option that turns out impossible; ContractViolation if a
///          policy proposes what it may not
std::vector<RunResult> replay(Sequence& sequence, const std::vector<std::shared_ptr<const Policy>>& policies,
                              const ReplayOptions& options, const std::string& where);

}  // namespace hae
