#include "sim/replay.hpp"

#include <algorithm>
#include <map>
#include <tuple>

#include "sim/row_kernels.hpp"
#include "sim/row_meter.hpp"

namespace hae {
namespace {

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

/// Everything the engine keeps of one policy's run over one sequence.
struct ActiveRun {
  std::shared_ptr<const Policy> policy;
  std::unique_ptr<Run> state;
  std::vector<LayerCache> caches;           ///< [layers begun so far]
  std::vector<std::vector<Index>> within;   ///< [layers] prompt tokens that give no row and no key, ascending
  std::vector<std::vector<Evict>> after;    ///< [layers] evictions that wait for the end of the layer's prefill
  RunResult result;
};

/// Refuses decisions that a policy may not take, and applies the others to cache and log.
class Arbiter {
 public:
  Arbiter(ActiveRun& run, const SequenceInfo& info) : run_(run), info_(info) {}

  /// Applies a prefill decision. `begun`: layers whose prefill has begun, so [0, begun) have caches.
  void prefill(const Decision& decision, Index begun, bool spares_recent) {
    HAE_EXPECTS(decision.mark.empty());
    note(decision);
    for (const Evict& evict : decision.evict) {
      expect(evict.layer >= 0 && evict.layer < info_.layers, 0, evict, "names a layer that does not exist");
      if (evict.layer < begun) {
        apply(0, evict, spares_recent);
        continue;
      }
      expect(evict.lane == Evict::kEveryLane, 0, evict, "acts on a single lane before the layer's prefill");
      expect(evict.token >= 0 && evict.token < info_.prompt, 0, evict, "is not a prompt token");
      check_sinks(0, evict);
      if (decision.effect == Effect::after) {
        run_.after[at(evict.layer)].push_back(evict);
      } else {
        remove_within(evict);
      }
    }
    recent_begin_.clear();
  }

  /// Evictions of `layer` that waited for the end of its prefill.
  void deferred(Index layer) {
    for (const Evict& evict : std::exchange(run_.after[at(layer)], {})) {
      apply(0, evict, false);
    }
  }

  /// Applies one decode step's decision of one layer.
  void decode(const Decision& decision, Index step, Index layer, const Limits& limits) {
    note(decision);
    LayerCache& cache = run_.caches[at(layer)];
    for (const Mark& mark : decision.mark) {
      const Evict as_evict{layer, mark.lane, mark.token, std::nullopt};
      check_lane(step, as_evict);
      expect(is_resident(mark.lane, layer, mark.token), step, as_evict, "is marked but not resident");
      expect(!cache.is_pending(mark.lane, mark.token), step, as_evict, "is marked twice");
      check_sinks(step, as_evict);
      expect(mark.token < cache.recent_begin(mark.lane, limits.recent), step, as_evict,
             "is marked but protected as recent");
      cache.mark(mark.lane, mark.token, step);
    }
    for (const Evict& evict : decision.evict) {
      expect(evict.layer == layer, step, evict, "belongs to another layer");
      apply(step, evict, true);
    }
    recent_begin_.clear();
    for (Index lane = 0; lane < cache.lanes(); ++lane) {
      if (limits.capacity && cache.residents(lane) > *limits.capacity) {
        throw ContractViolation(run_.policy->spec() + ": step " + std::to_string(step) + ", layer " +
                                std::to_string(layer) + ", lane " + std::to_string(lane) + " holds " +
                                std::to_string(cache.residents(lane)) + " tokens, more than its stated " +
                                std::to_string(*limits.capacity));
      }
    }
  }

 private:
  void note(const Decision& decision) {
    run_.result.warnings.insert(run_.result.warnings.end(), decision.warnings.begin(), decision.warnings.end());
  }

  void expect(bool holds, Index step, const Evict& evict, const char* complaint) const {
    if (!holds) {
      throw ContractViolation(run_.policy->spec() + ": step " + std::to_string(step) + ", layer " +
                              std::to_string(evict.layer) + ", lane " + std::to_string(evict.lane) + ": token " +
                              std::to_string(evict.token) + " " + complaint);
    }
  }

  bool is_resident(Index lane, Index layer, Index token) const {
    const LayerCache& cache = run_.caches[at(layer)];
    return token >= 0 && token < cache.joined() && cache.is_resident(lane, token);
  }

  void check_lane(Index step, const Evict& evict) const {
    expect(evict.lane >= 0 && evict.lane < run_.caches[at(evict.layer)].lanes(), step, evict,
           "names a lane that does not exist");
  }

  void check_sinks(Index step, const Evict& evict) const {
    expect(evict.token >= run_.state->limits(evict.layer).sinks, step, evict, "is a protected sink");
  }

  Index logged_lane(Index lane) const {
    return run_.policy->lanes() == LaneKind::layer ? kLayerLane : lane;
  }

  void apply(Index step, const Evict& evict, bool spares_recent) {
    const Index lanes = run_.caches[at(evict.layer)].lanes();
    if (evict.lane != Evict::kEveryLane) {
      check_lane(step, evict);
    }
    for (Index lane = 0; lane < lanes; ++lane) {
      if (evict.lane == Evict::kEveryLane || evict.lane == lane) {
        apply_to_lane(step, evict, lane, spares_recent);
      }
    }
  }

  void apply_to_lane(Index step, const Evict& evict, Index lane, bool spares_recent) {
    LayerCache& cache = run_.caches[at(evict.layer)];
    expect(is_resident(lane, evict.layer, evict.token), step, evict, "is evicted but not resident");
    check_sinks(step, evict);
    if (spares_recent) {
      const auto [begin, is_first] = recent_begin_.try_emplace({evict.layer, lane}, 0);
      if (is_first) {
        begin->second = cache.recent_begin(lane, run_.state->limits(evict.layer).recent);
      }
      expect(evict.token < begin->second, step, evict, "is protected as recent");
    }
    LogEntry entry{step, evict.layer, logged_lane(lane), evict.token, false, evict.score, {}, {}};
    if (cache.is_pending(lane, evict.token)) {
      entry.pending_since = cache.pending_since(lane, evict.token);
    }
    cache.evict(lane, evict.token);
    run_.result.log.entries.push_back(entry);
  }

  void remove_within(const Evict& evict) {
    std::vector<Index>& within = run_.within[at(evict.layer)];
    const auto place = std::ranges::lower_bound(within, evict.token);
    expect(place == within.end() || *place != evict.token, 0, evict, "is evicted twice");
    within.insert(place, evict.token);
    for (Index lane = 0; lane < lane_count(info_, run_.policy->lanes()); ++lane) {
      run_.result.log.entries.push_back(
          {0, evict.layer, logged_lane(lane), evict.token, true, evict.score, {}, {}});
    }
  }

  ActiveRun& run_;
  const SequenceInfo& info_;

  /// First protected position by (layer, lane), as it was before the first eviction of the decision.
  std::map<std::pair<Index, Index>, Index> recent_begin_;
};

/// Replays one sequence: all layers' prefill in order, then each layer's decode.
class SequenceReplay {
 public:
  SequenceReplay(Sequence& sequence, const std::vector<std::shared_ptr<const Policy>>& policies,
                 const ReplayOptions& options, const std::string& where)
      : sequence_(sequence),
        info_(sequence.info()),
        options_(options),
        where_(where + ": sequence '" + sequence.info().name + "'") {
    for (const std::shared_ptr<const Policy>& policy : policies) {
      check_needs(*policy);
    }
    for (const std::shared_ptr<const Policy>& policy : policies) {
      start(policy);
    }
  }

  std::vector<RunResult> run() {
    for (Index layer = 0; layer < info_.layers; ++layer) {
      prefill(layer);
    }
    for (ActiveRun& run : runs_) {
      Arbiter(run, info_).prefill(run.state->balance(run.caches), info_.layers, true);
    }
    for (Index layer = 0; layer < info_.layers; ++layer) {
      decode(layer);
    }
    std::vector<RunResult> results;
    for (ActiveRun& run : runs_) {
      finish(run);
      results.push_back(std::move(run.result));
    }
    return results;
  }

 private:
  /// Runs whose caches hold the same tokens share everything computed from a row.
  struct Group {
    std::vector<ActiveRun*> runs;
    std::vector<std::span<const float>> keep;
  };

  void check_needs(const Policy& policy) const {
    for (Index layer = 0; layer < info_.layers; ++layer) {
      const PromptRows needed = policy.needs(info_, layer).prompt_rows;
      if (needed == PromptRows::none) {
        continue;
      }
      auto stored = info_.prompt_rows.begin();
      for (Index row = 0; row < info_.prompt; ++row) {
        const bool has = stored != info_.prompt_rows.end() && *stored == row;
        stored += has ? 1 : 0;
        if (!has && (needed == PromptRows::all || !info_.is_visual(row))) {
          throw NeedsError(where_ + " lacks prompt row " + std::to_string(row) + ", which policy '" +
                           policy.spec() + "' needs in layer " + std::to_string(layer) + " (it needs " +
                           (needed == PromptRows::all ? "all prompt rows" : "all rows of prompt text") +
                           "); record the rows, or choose a policy that does without");
        }
      }
    }
  }

  void start(const std::shared_ptr<const Policy>& policy) {
    ActiveRun& run = runs_.emplace_back();
    run.policy = policy;
    run.state = policy->begin(info_);
    run.within.resize(at(info_.layers));
    run.after.resize(at(info_.layers));
    run.caches.reserve(at(info_.layers));
    run.result.lanes = policy->lanes();
    const Index lanes = info_.layers * lane_count(info_, policy->lanes());
    run.result.attention_tokens.resize(at(lanes * info_.steps()));
    run.result.final_tokens.resize(at(lanes));
    run.result.decode = Series(info_.layers, info_.query_heads, info_.steps());
  }

  /// Rows whose weights fill about 4 MiB.
  [[nodiscard]] Index block_rows() const {
    if (options_.block_rows > 0) {
      return options_.block_rows;
    }
    const Index row_bytes = info_.query_heads * kernels::padded(info_.tokens) * Index{sizeof(float)};
    return std::clamp<Index>((Index{4} << 20) / row_bytes, 1, 96);
  }

  void prefill(Index layer) {
    const std::unique_ptr<LayerPayload> payload = sequence_.layer(layer);
    RowMeter meter(info_, finite_values(*payload, layer));
    LayerWeights weights(info_, layer, *payload, options_.nan, where_);
    std::map<std::vector<Index>, Group> groups;  // by the tokens that are missing within this prefill
    for (ActiveRun& run : runs_) {
      begin_layer(run, layer);
      const std::vector<Index>& within = run.within[at(layer)];
      Group& group = groups[within];
      group.runs.push_back(&run);
      group.keep.assign(1, run.caches.back().keep(0));
      if (!within.empty() && run.result.prefill.layers == 0) {
        run.result.prefill = Series(info_.layers, info_.query_heads, info_.prompt);
      }
    }
    const auto stored_rows = static_cast<Index>(info_.prompt_rows.size());
    WeightBlock block;
    for (Index begin = 0; begin < stored_rows; begin += block_rows()) {
      weights.prompt({begin, std::min(stored_rows, begin + block_rows())}, block);
      meter.begin();
      for (const auto& [within, group] : groups) {
        observe(group, within, block, meter);
      }
      report(block.rows());
    }
    count(weights);
    for (ActiveRun& run : runs_) {
      Arbiter arbiter(run, info_);
      arbiter.deferred(layer);
      arbiter.prefill(run.state->prune(layer, run.caches.back()), layer + 1, false);
      arbiter.prefill(run.state->fit(layer, run.caches.back()), layer + 1, true);
    }
  }

  void begin_layer(ActiveRun& run, Index layer) {
    LayerCache& cache = run.caches.emplace_back(info_, run.policy->lanes());
    const std::vector<Index>& within = run.within[at(layer)];
    auto missing = within.begin();
    for (Index token = 0; token < info_.prompt; ++token) {
      if (missing != within.end() && *missing == token) {
        cache.skip(token);
        ++missing;
      } else {
        cache.join(token);
      }
    }
    run.result.prefill_tokens += cache.residents(0) * cache.lanes();
  }

  void observe(const Group& group, const std::vector<Index>& within, const WeightBlock& block, RowMeter& meter) {
    std::vector<Index> present;
    for (Index r = 0; r < block.rows(); ++r) {
      if (!std::ranges::binary_search(within, block.queries[at(r)])) {
        present.push_back(r);
      }
    }
    if (present.empty()) {
      return;
    }
    const Rows rows(block, std::move(present), group.keep);
    for (Index r = 0; !within.empty() && r < rows.rows(); ++r) {
      const std::span<const RowMeter::Measured> measured = meter.measure(rows, r);
      for (ActiveRun* run : group.runs) {
        store(measured, run->result.prefill, rows.layer(), rows.query(r), run->result);
      }
    }
    for (ActiveRun* run : group.runs) {
      run->state->observe(rows);
    }
  }

  void decode(Index layer) {
    std::vector<std::unique_ptr<LayerDecode>> states;
    std::vector<Limits> limits;
    for (ActiveRun& run : runs_) {
      states.push_back(run.state->decode(layer));
      limits.push_back(run.state->limits(layer));
      run.result.limits.push_back(limits.back());
    }
    if (info_.steps() > 0) {
      decode_steps(layer, states, limits);
    }
    for (ActiveRun& run : runs_) {
      const LayerCache& cache = run.caches[at(layer)];
      for (Index lane = 0; lane < cache.lanes(); ++lane) {
        run.result.final_tokens[at(layer * cache.lanes() + lane)] = cache.residents(lane);
      }
    }
  }

  void decode_steps(Index layer, std::vector<std::unique_ptr<LayerDecode>>& states,
                    const std::vector<Limits>& limits) {
    const std::unique_ptr<LayerPayload> payload = sequence_.layer(layer);
    RowMeter meter(info_, finite_values(*payload, layer));
    LayerWeights weights(info_, layer, *payload, options_.nan, where_);
    WeightBlock block;
    for (Index begin = 1; begin <= info_.steps(); begin += block_rows()) {
      weights.decode({begin, std::min(info_.steps() + 1, begin + block_rows())}, block);
      meter.begin();
      for (Index r = 0; r < block.rows(); ++r) {
        decode_step(layer, begin + r, block, r, meter, states, limits);
      }
      report(block.rows());
    }
    count(weights);
  }

  void decode_step(Index layer, Index step, const WeightBlock& block, Index block_row, RowMeter& meter,
                   std::vector<std::unique_ptr<LayerDecode>>& states, const std::vector<Limits>& limits) {
    std::vector<std::vector<std::size_t>> groups;
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      LayerCache& cache = runs_[i].caches[at(layer)];
      cache.join(info_.prompt + step - 1);
      record_sizes(runs_[i].result, cache, layer, step);
      const auto same = std::ranges::find_if(groups, [&](const std::vector<std::size_t>& group) {
        return runs_[group.front()].caches[at(layer)].same_residents(cache);
      });
      (same == groups.end() ? groups.emplace_back() : *same).push_back(i);
    }
    for (const std::vector<std::size_t>& group : groups) {
      share_step(layer, step, Rows(block, {block_row}, lanes_of(runs_[group.front()].caches[at(layer)])), meter,
                 group, states, limits);
    }
  }

  /// One step of runs with equal residents: all of them decide before any cache changes.
  void share_step(Index layer, Index step, const Rows& row, RowMeter& meter, const std::vector<std::size_t>& group,
                  std::vector<std::unique_ptr<LayerDecode>>& states, const std::vector<Limits>& limits) {
    const std::span<const RowMeter::Measured> measured = meter.measure(row, 0);
    std::vector<Decision> decisions;
    for (const std::size_t i : group) {
      store(measured, runs_[i].result.decode, layer, step - 1, runs_[i].result);
      decisions.push_back(states[i]->step(row, runs_[i].caches[at(layer)]));
    }
    for (std::size_t i = 0; i < group.size(); ++i) {
      Arbiter(runs_[group[i]], info_).decode(decisions[i], step, layer, limits[group[i]]);
    }
  }

  static std::vector<std::span<const float>> lanes_of(const LayerCache& cache) {
    std::vector<std::span<const float>> keep;
    for (Index lane = 0; lane < cache.lanes(); ++lane) {
      keep.push_back(cache.keep(lane));
    }
    return keep;
  }

  void record_sizes(RunResult& result, const LayerCache& cache, Index layer, Index step) const {
    for (Index lane = 0; lane < cache.lanes(); ++lane) {
      result.attention_tokens[at((layer * cache.lanes() + lane) * info_.steps() + step - 1)] =
          cache.residents(lane);
    }
  }

  static void store(std::span<const RowMeter::Measured> measured, Series& series, Index layer, Index row,
                    RunResult& result) {
    for (Index h = 0; h < series.query_heads; ++h) {
      const RowMeter::Measured& m = measured[at(h)];
      series.at(Metric::missed_mass, layer, h, row) = m.missed_mass;
      series.at(Metric::kl, layer, h, row) = m.kl;
      series.at(Metric::output_error, layer, h, row) = m.output_error;
      series.at(Metric::output_error_relative, layer, h, row) = m.output_error_relative;
      result.removed_all_rows += m.removed_all ? 1 : 0;
    }
  }

  void count(const LayerWeights& weights) {
    for (ActiveRun& run : runs_) {
      run.result.masked_rows += weights.masked_rows();
      run.result.lowered_weights += weights.lowered();
    }
  }

  /// V of a layer, every number finite: an infinite value would turn all output errors into NaN.
  View<const float, 3> finite_values(LayerPayload& payload, Index layer) const {
    const View<const float, 3> values = payload.values();
    for (Index h = 0; h < values.extent(0); ++h) {
      for (Index t = 0; t < values.extent(1); ++t) {
        const View<const float, 1> value = values[h][t];
        if (!kernels::maximum(value.data(), 0, value.extent(0)).finite) {
          throw TraceError(where_ + ", layer " + std::to_string(layer) + ", KV head " + std::to_string(h) +
                           ", token " + std::to_string(t) + ": the value vector is not finite; record again");
        }
      }
    }
    return values;
  }

  void report(Index rows) {
    rows_done_ += rows;
    if (options_.progress) {
      const auto total = static_cast<Index>(info_.prompt_rows.size()) + info_.steps();
      options_.progress(static_cast<double>(rows_done_) / static_cast<double>(info_.layers * total));
    }
  }

  void finish(ActiveRun& run) const {
    RunResult& result = run.result;
    std::ranges::sort(result.log.entries, {}, [](const LogEntry& e) {
      return std::tuple(e.step, e.layer, e.lane, e.token);
    });
    for (Index layer = 0; layer < info_.layers; ++layer) {
      const LayerCache& cache = run.caches[at(layer)];
      for (Index lane = 0; lane < cache.lanes(); ++lane) {
        std::vector<Index> pending(cache.pending(lane).begin(), cache.pending(lane).end());
        std::ranges::sort(pending);
        for (const Index token : pending) {
          result.log.pending.push_back({layer, run.policy->lanes() == LaneKind::layer ? kLayerLane : lane, token,
                                        cache.pending_since(lane, token)});
        }
      }
    }
    result.moved = count_moved(info_, result.log);
    warn_if_nothing_generated_stays(run);
  }

  void warn_if_nothing_generated_stays(ActiveRun& run) const {
    Index lanes = 0;
    Index bare = 0;
    for (const LayerCache& cache : run.caches) {
      for (Index lane = 0; lane < cache.lanes(); ++lane) {
        bool retains = false;
        for (Index token = info_.prompt; token < cache.joined() && !retains; ++token) {
          retains = cache.is_resident(lane, token);
        }
        ++lanes;
        bare += retains ? 0 : 1;
      }
    }
    if (info_.steps() > 0 && bare > 0) {
      run.result.warnings.push_back("0 of " + std::to_string(info_.steps()) + " generated tokens retained in " +
                                    std::to_string(bare) + " of " + std::to_string(lanes) + " lanes");
    }
  }

  Sequence& sequence_;
  const SequenceInfo& info_;
  const ReplayOptions& options_;
  std::string where_;
  std::vector<ActiveRun> runs_;
  Index rows_done_ = 0;
};

}  // namespace

std::vector<RunResult> replay(Sequence& sequence, const std::vector<std::shared_ptr<const Policy>>& policies,
                              const ReplayOptions& options, const std::string& where) {
  return SequenceReplay(sequence, policies, options, where).run();
}

}  // namespace hae
