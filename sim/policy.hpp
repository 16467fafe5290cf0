#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sim/cache.hpp"
#include "sim/log.hpp"
#include "sim/rows.hpp"

namespace hae {

/// Which prompt rows of a layer a policy must observe.
enum class PromptRows { none, text, all };

/// What a policy needs from a trace in one layer; a trace that lacks it is refused before anything runs.
struct Needs {
  PromptRows prompt_rows = PromptRows::none;
  Index newest_prompt_rows = 0;  ///< besides those, the last rows of the prompt
  bool keys = false;             ///< after rotary embedding
  bool values = false;
  bool unrotated_queries = false;     ///< of the prompt, before rotary embedding
  bool embedding_similarity = false;  ///< layer 0 only
};

/// What a layer computed of every token, by position; empty where the policy did not ask for it. Of tokens
/// that are not resident a policy must make no use.
struct LayerVectors {
  View<const float, 3> keys;                   ///< [kv_heads, T, head_dim] after rotary embedding
  View<const float, 3> values;                 ///< [kv_heads, T, head_dim]
  View<const float, 3> unrotated_queries;      ///< [query_heads, P, head_dim]
  View<const double, 2> embedding_similarity;  ///< layer 0: [visual prompt tokens, text prompt tokens]
};

/// What a policy promises about a lane, shown in results. The engine holds it to sinks, recent, bin (most
/// pending tokens) and capacity after the prefill and after every step; the budget is what capacity follows
/// from.
struct Limits {
  Index sinks = 0;                ///< positions 0 .. sinks - 1 are never evicted, by any stage
  Index recent = 0;               ///< the newest residents, never evicted by score
  std::optional<Index> budget;    ///< l
  std::optional<Index> bin;       ///< D
  std::optional<Index> capacity;  ///< most residents after the prefill, and after a step
  bool grows = false;             ///< the capacity grows by one a step: nothing is evicted while decoding

  bool operator==(const Limits&) const = default;
};

/// Evict `token` from one lane, or from every lane of the layer.
struct Evict {
  static constexpr Index kEveryLane = -1;

  Index layer = 0;
  Index lane = kEveryLane;
  Index token = 0;
  std::optional<double> score;
  std::optional<Merge> merge;  ///< prefill only; all merges of a layer in one decision
};

/// Put a resident token into the recycle bin: it stays, and is attended to, until it is evicted.
struct Mark {
  Index lane = 0;
  Index token = 0;
};

/// How an eviction acts on a layer whose prefill has not begun: the token gives no row and no key there, or
/// it is removed from the cache when the layer's prefill attention is over.
enum class Effect { within, after };

/// What a policy proposes. The engine checks it and applies it; a policy never changes a cache.
struct Decision {
  std::vector<Evict> evict;
  std::vector<Mark> mark;  ///< applied before the evictions; decode only
  Effect effect = Effect::within;
  std::vector<std::string> warnings;
};

/// Decode state of one layer. It shares nothing with other layers, so they may run in any order and in
/// parallel.
class LayerDecode {
 public:
  virtual ~LayerDecode() = default;

  /// Observes the one row of a step, whose token has joined `cache`, and decides.
  virtual Decision step(const Rows& row, const LayerCache& cache) = 0;
};

/// State of one run over one sequence. The engine calls, for each layer in order: begin_layer, observe
/// (blocks of rows, ascending), prune, fit; then balance once; then decode of every layer.
class Run {
 public:
  virtual ~Run() = default;

  /// Before a layer's first row. The vectors stay valid until the layer's fit is over.
  virtual void begin_layer(Index /*layer*/, const LayerVectors& /*vectors*/) {}

  /// Prompt rows of residents of a layer. The size of a block must not change any result.
  virtual void observe(const Rows& /*rows*/) {}

  /// After a layer's last prompt row: evictions for any layers.
  virtual Decision prune(Index /*layer*/, const LayerCache& /*cache*/) { return {}; }

  /// After the layer's pruning was applied: down to budget, in this layer.
  virtual Decision fit(Index /*layer*/, const LayerCache& /*cache*/) { return {}; }

  /// After the last layer's prefill: for policies that share budgets over layers.
  virtual Decision balance(const std::vector<LayerCache>& /*caches*/) { return {}; }

  /// The layer's decode state; it takes what the prefill left for it.
  virtual std::unique_ptr<LayerDecode> decode(Index layer) = 0;

  /// A lane's limits; sinks hold from the beginning, recent from fit on, the rest from the end of the
  /// prefill.
  [[nodiscard]] virtual Limits limits(Index layer, Index lane) const = 0;
};

/// Sizes of one lane over the decode steps, at attention time (the step's own token included).
struct LaneSizes {
  Index total = 0;
  Index peak = 0;
};

/// A configured policy: immutable, shared by sequences.
class Policy {
 public:
  virtual ~Policy() = default;

  /// Canonical spec: the name and the options that were given, e.g. `hae:r=0.0015,bin=64`.
  [[nodiscard]] virtual std::string spec() const = 0;

  /// Every option, defaults too, in the order of the policy's table.
  [[nodiscard]] virtual std::vector<std::pair<std::string, std::string>> options() const = 0;

  [[nodiscard]] virtual LaneKind lanes() const { return LaneKind::layer; }
  [[nodiscard]] virtual Needs needs(const SequenceInfo& info, Index layer) const = 0;

  /// Starts a sequence; nothing is remembered from another one.
  [[nodiscard]] virtual std::unique_ptr<Run> begin(const SequenceInfo& info) const = 0;

  /// Whether it merges what it evicts. Such a run has its own keys and values, so it is measured by its
  /// outputs alone.
  [[nodiscard]] virtual bool merges() const { return false; }

  /// Whether the sizes after its prefill's pruning depend on the trace.
  [[nodiscard]] virtual bool prunes() const { return false; }

  /// Whether it has a budget and was given none, so that a matched one may be set.
  [[nodiscard]] virtual bool budget_is_open() const { return false; }

  /// The same policy with a budget; only where budget_is_open().
  [[nodiscard]] virtual std::shared_ptr<const Policy> with_budget(Index /*budget*/) const { return nullptr; }

  /// Sizes under a budget of the layer's lanes, each of which holds `residents` tokens when its prefill's
  /// pruning is over (of lanes that differ: of one with their mean budget); none if the budget is impossible.
  /// Only where budget_is_open().
  [[nodiscard]] virtual std::optional<LaneSizes> sizes(const SequenceInfo& /*info*/, Index /*layer*/,
                                                       Index /*budget*/, Index /*residents*/) const {
    return std::nullopt;
  }
};

}  // namespace hae
