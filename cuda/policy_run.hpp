#pragma once

#include <functional>
#include <optional>
#include <string>

#include "cuda/dual_attention_pruning.hpp"
#include "cuda/pooled_scores.hpp"
#include "sim/policy.hpp"
#include "sim/rows.hpp"

namespace hae::device {

/// DAP as a policy asks for it: which layers decide, for whom, and when it acts.
struct Pruning {
  PruningRule rule;
  HeadReduction heads = HeadReduction::mean;
  bool per_image = false;  ///< A_V of each picture, else of all of them
  bool broadcast = true;   ///< layer 0 decides for all layers, else each for itself
  Effect effect = Effect::within;
};

/// What ranks the tokens of a lane.
struct Ranking {
  enum class By {
    age,         ///< the oldest first: no score
    draw,        ///< a fixed random priority: no score
    attention,   ///< cumulative attention
    newest_row,  ///< attention of the newest row alone
    last_rows,   ///< of the last rows of the prompt, pooled
  } by = By::age;
  Reduction reduction;                ///< of attention and newest_row
  bool divides_by_exposures = false;  ///< attention: per observed row that could see the token
  std::uint64_t seed = 0;             ///< of draw
  Index window = 0;                   ///< of last_rows: how many
  Pooling pooling;                    ///< of last_rows
};

/// When tokens leave by their rank, once a layer's pruning is over.
enum class Eviction {
  never,
  after_prefill,  ///< down to the budget l once, when the layer's prefill is over
  every_step,     ///< then, and after each step
  mark,   ///< then; each step with more than l unmarked residents marks one; D marked ones leave at once
  batch,  ///< then; at l + D residents, D leave at once
};

/// A policy as the device backend runs it. Which policies are made of these parts, and how their options
/// become them, is told by whoever knows the policies (sim/cli/device_policy).
struct PolicyRun {
  std::string spec;  ///< begins messages
  LaneKind lanes = LaneKind::layer;
  std::optional<Pruning> pruning;
  Ranking ranking;
  Eviction eviction = Eviction::never;

  /// What a lane of a layer promises, given the residents it holds when the layer's pruning is over: budget
  /// and bin, what is protected.
  ///
  /// throws  ConfigError when it cannot be kept
  std::function<Limits(Index residents)> limits;

  /// What a lane with a budget holds instead where the layer has a sliding window: the sinks and the newest
  /// tokens; none where the budget does not exceed that.
  std::function<std::optional<Limits>(const Limits& promised, Index window)> capped;
};

}  // namespace hae::device
