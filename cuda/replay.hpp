#pragma once

#include <span>
#include <string>
#include <vector>

#include "cuda/policy_run.hpp"
#include "sim/log.hpp"
#include "sim/trace.hpp"
#include "sim/weights.hpp"

namespace hae::device {

/// One sequence and the policy to run it through.
struct Job {
  Sequence* sequence = nullptr;
  PolicyRun run;
  std::string where;  ///< begins the message of an error, e.g. `trace.h5`
};

struct Options {
  NanRule nan = NanRule::error;
  Index memory_bytes = 0;  ///< most that may be used on the device; 0: most of what is free
  Stream stream = nullptr;
};

/// What a layer's pruning found.
struct PruningReport {
  Index layer = 0;
  Index text_rows = 0;
  Index candidates = 0;
  Index evicted = 0;
  double mass = 0;  ///< Σ of A_j over the candidates, ascending
};

/// What one policy did to one sequence.
struct DeviceRun {
  LaneKind lanes = LaneKind::layer;
  EvictionLog log;
  std::vector<bool> is_capped;         ///< [layers] whether the budget exceeded the layer's sliding window
  std::vector<Limits> limits;          ///< [layers, lanes] what the policy promised
  std::vector<PruningReport> pruning;  ///< of the layers that decided
};

/// Replays whole sequences through policies on the device: weights, scores and decisions are formed there,
/// bit for bit those of the reference (docs/arithmetic.md). Layers of all sequences run side by side, as many
/// as fit into the device's memory, in two passes:
///
///   pruning   the text rows of the layers that decide, and their decisions
///   eviction  of every layer: the prompt's rows, fit to the budget, then step by step: the token joins, its
///             row is added to the scores, tokens are chosen, marked and evicted
///
/// Within a step nothing is allocated, and nothing comes back to the host: how many tokens a lane marks or
/// evicts follows from its sizes alone.
///
/// jobs     of one policy, whose budgets may differ
/// returns  one run a job, in order
/// throws   DeviceError for a device that is missing or unsuitable, or too little memory (the next call is
///          unharmed); TraceError for a payload that breaks the format; ConfigError for an option that turns
///          out impossible
std::vector<DeviceRun> replay(std::span<const Job> jobs, const Options& options);

}  // namespace hae::device
