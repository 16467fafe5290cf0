#include "analysis/decode_walk.hpp"

#include <algorithm>
#include <memory>
#include <vector>

#include "sim/active_run.hpp"
#include "sim/row_progress.hpp"

namespace hae::analysis {
namespace {

/// The evictions of one layer, handed out by step.
class LayerLog {
 public:
  LayerLog(const EvictionLog& log, Index layer) {
    std::ranges::copy_if(log.entries, std::back_inserter(entries_),
                         [&](const LogEntry& entry) { return entry.layer == layer; });
  }

  /// Those of the step; steps ascend.
  std::span<const LogEntry> of_step(Index step) {
    const auto begin = entries_.begin() + next_;
    const auto end = std::find_if(begin, entries_.end(), [&](const LogEntry& e) { return e.step > step; });
    next_ = end - entries_.begin();
    return {begin, end};
  }

 private:
  std::vector<LogEntry> entries_;  ///< ascending by (step, lane, token), as in the log
  std::ptrdiff_t next_ = 0;
};

/// A layer's cache as the prefill left it.
LayerCache after_prefill(const SequenceInfo& info, LaneKind lanes, std::span<const LogEntry> evicted) {
  LayerCache cache(info, lanes);
  for (Index token = 0; token < info.prompt; ++token) {
    cache.join(token);
  }
  for (const LogEntry& entry : evicted) {
    cache.evict(std::max<Index>(entry.lane, 0), entry.token);
  }
  return cache;
}

class Walk {
 public:
  Walk(Sequence& sequence, const RunResult& run, const ReplayOptions& options, const std::string& where,
       std::span<DecodeVisitor* const> visitors)
      : sequence_(sequence),
        info_(sequence.info()),
        run_(run),
        options_(options),
        where_(where + ": sequence '" + info_.name + "'"),
        visitors_(visitors),
        progress_(options.progress, info_.layers * info_.steps()) {
    check_info(info_, where_);
  }

  void layer(Index layer) {
    LayerLog log(run_.log, layer);
    const std::span<const LogEntry> gone = log.of_step(0);
    LayerCache cache = after_prefill(info_, run_.lanes, gone);
    for (DecodeVisitor* visitor : visitors_) {
      visitor->begin_layer(layer, gone);
    }
    const std::unique_ptr<LayerPayload> payload = sequence_.layer(layer);
    LayerWeights weights(info_, layer, info_.tokens, *payload, options_.nan, where_);
    const View<const float, 3> values = info_.has_values ? payload->values() : View<const float, 3>{};
    const Index at_a_time = options_.block_rows > 0 ? options_.block_rows : weight_block_rows(info_);
    WeightBlock block;
    for (Index begin = 1; begin <= info_.steps(); begin += at_a_time) {
      weights.decode({begin, std::min(info_.steps() + 1, begin + at_a_time)}, block);
      for (Index row = 0; row < block.rows(); ++row) {
        const Index step = begin + row;
        cache.join(info_.prompt + step - 1);
        const std::span<const LogEntry> evicted = log.of_step(step);
        for (DecodeVisitor* visitor : visitors_) {
          visitor->row({layer, step, block, row, cache, values, evicted});
        }
        for (const LogEntry& entry : evicted) {
          cache.evict(std::max<Index>(entry.lane, 0), entry.token);
        }
      }
      progress_.add(block.rows());
    }
  }

 private:
  Sequence& sequence_;
  const SequenceInfo& info_;
  const RunResult& run_;
  const ReplayOptions& options_;
  std::string where_;
  std::span<DecodeVisitor* const> visitors_;
  RowProgress progress_;
};

}  // namespace

void walk_decode(Sequence& sequence, const RunResult& run, const ReplayOptions& options,
                 const std::string& where, std::span<DecodeVisitor* const> visitors) {
  HAE_EXPECTS(!run.merges);
  check_floating_point_mode();
  Walk walk(sequence, run, options, where, visitors);
  for_each(options.for_each, sequence.info().layers, [&](Index layer) { walk.layer(layer); });
}

}  // namespace hae::analysis
