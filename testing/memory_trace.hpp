#pragma once

#include <iosfwd>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sim/closed_loop.hpp"
#include "sim/replay.hpp"
#include "sim/trace.hpp"

namespace hae::testing {

/// A sequence in memory. Fill `info` and the payload's arrays, or use one of the makers below.
struct MemoryTrace {
  SequenceInfo info;
  std::vector<std::vector<float>> queries;            ///< [layers][query_heads, T, head_dim]
  std::vector<std::vector<float>> unrotated_queries;  ///< the same, before rotary embedding, or empty
  std::vector<std::vector<float>> keys;               ///< [layers][kv_heads, T, head_dim]
  std::vector<std::vector<float>> values;             ///< [layers][kv_heads, T, head_dim], or empty
  std::vector<std::vector<float>> attention;          ///< [layers][query_heads, T, T]: row i, key j
  std::vector<double> similarity;  ///< [visual prompt tokens, text prompt tokens], or empty
};

/// The trace as the engine reads it.
class MemorySequence final : public Sequence {
 public:
  explicit MemorySequence(const MemoryTrace& trace) : trace_(trace) {}
  [[nodiscard]] const SequenceInfo& info() const override { return trace_.info; }
  [[nodiscard]] std::unique_ptr<LayerPayload> layer(Index layer) override;

 private:
  const MemoryTrace& trace_;
};

/// An attention trace of one head and one layer per given matrix: `rows[layer][i]` lists row i's
/// probabilities, shorter rows end in zeros. image[j] is -1 for text.
MemoryTrace attention_trace(const std::vector<std::vector<std::vector<float>>>& layers, Index prompt,
                            const std::vector<Index>& image);

/// The same for several heads: `heads[layer][head][i]`.
MemoryTrace attention_trace(const std::vector<std::vector<std::vector<std::vector<float>>>>& layers,
                            Index kv_heads, Index prompt, const std::vector<Index>& image);

/// Replays one policy over a trace.
RunResult run(const MemoryTrace& trace, const std::shared_ptr<const Policy>& policy,
              const ReplayOptions& options = {});

/// The log as `step/layer/lane/token`, with `w` for evictions within and `@s` for the step of marking.
std::string brief(const EvictionLog& log);

/// Runs one policy in a closed loop whose model computes what a qkv trace holds, all layers of a step before
/// the next step.
///
/// steps  decode steps to make; the loop was told info.steps()
ClosedLoop::Finished run_closed(const MemoryTrace& trace, const std::shared_ptr<const Policy>& policy,
                                Index steps);

/// The trace's rows of the tokens at `positions`: what a layer of a model would give.
struct ModelRows {
  std::vector<float> queries;
  std::vector<float> keys;
  std::vector<float> values;
  LayerRows rows;

  ModelRows(const MemoryTrace& trace, Index layer, const std::vector<Index>& positions);
};

/// Whether both hold the same numbers; NaN equals NaN.
bool same_numbers(std::span<const double> a, std::span<const double> b);

/// Whether two runs left the same log, sizes, figures and counts behind, bit for bit.
bool same_results(const RunResult& a, const RunResult& b);

/// Residents of a lane of a layer after each moment: index 0 is after the prefill, s after step s.
std::vector<std::vector<Index>> residents(const MemoryTrace& trace, const RunResult& run, Index layer,
                                          Index lane);

/// Tokens up to which a printed trace shows its numbers.
inline constexpr Index kShownTokens = 6;

/// The shape and, of at most kShownTokens tokens, every number as the shortest text that reads back equal:
/// what a failing property prints.
std::ostream& operator<<(std::ostream& out, const MemoryTrace& trace);

}  // namespace hae::testing
