#include "sim/replay.hpp"

#include <algorithm>
#include <map>
#include <numeric>

#include "sim/active_run.hpp"
#include "sim/merged_layer.hpp"
#include "sim/needs.hpp"
#include "sim/row_kernels.hpp"
#include "sim/row_meter.hpp"
#include "sim/row_progress.hpp"

namespace hae {
namespace {

/// Replays one sequence: all layers' prefill in order, then each layer's decode.
class SequenceReplay {
 public:
  SequenceReplay(Sequence& sequence, const std::vector<std::shared_ptr<const Policy>>& policies,
                 const ReplayOptions& options, const std::string& where)
      : sequence_(sequence),
        info_(sequence.info()),
        options_(options),
        where_(where + ": sequence '" + sequence.info().name + "'"),
        progress_(
            options.progress,
            info_.layers * (options.prompt_rows ? static_cast<Index>(info_.prompt_rows.size()) + info_.steps()
                                                : info_.steps())) {
    check_info(info_, where_);
    for (const std::shared_ptr<const Policy>& policy : policies) {
      check_needs(info_, *policy, options.prompt_rows, where_);
    }
    for (const std::shared_ptr<const Policy>& policy : policies) {
      runs_.emplace_back(policy, info_);
    }
  }

  std::vector<RunResult> run() {
    for (Index layer = 0; layer < info_.layers; ++layer) {
      prefill(layer);
    }
    for (ActiveRun& run : runs_) {
      run.end_prefill();
    }
    // Layers share nothing in decoding: each writes into its own caches, ledgers and parts of the results.
    for_each(options_.for_each, info_.layers, [&](Index layer) { decode_layer(layer); });
    std::vector<RunResult> results;
    for (ActiveRun& run : runs_) {
      results.push_back(run.finish(info_.steps()));
    }
    return results;
  }

 private:
  /// Runs whose caches hold the same tokens share everything computed from a row.
  struct Group {
    std::vector<ActiveRun*> runs;
    std::vector<std::span<const float>> keep;
  };

  /// A run that merged tokens of a layer has rows of its own there.
  struct Merging {
    ActiveRun& run;
    MergedLayer layer;
    WeightBlock block;
  };
  using Mergings = std::vector<std::unique_ptr<Merging>>;

  [[nodiscard]] Index block_rows() const {
    return options_.block_rows > 0 ? options_.block_rows : weight_block_rows(info_);
  }

  void prefill(Index layer) {
    for (ActiveRun& run : runs_) {
      run.begin_layer(layer);
    }
    const std::unique_ptr<LayerPayload> payload = sequence_.layer(layer);
    for (ActiveRun& run : runs_) {
      run.show_vectors(layer, *payload);
    }
    if (options_.prompt_rows) {
      observe_prompt(layer, *payload);
    }
    for (ActiveRun& run : runs_) {
      run.end_layer_prefill(layer);
    }
  }

  void observe_prompt(Index layer, LayerPayload& payload) {
    std::map<std::vector<Index>, Group> groups;  // by the tokens that are missing within this prefill
    const Mergings mergings = merging_runs(layer, payload, info_.prompt);
    for (ActiveRun& run : runs_) {
      const std::vector<Index>& within = run.within[at(layer)];
      if (!within.empty() && run.result.prefill.layers == 0) {
        run.result.prefill = Series(info_.layers, info_.query_heads, info_.prompt);
      }
      if (!run.merged[at(layer)].empty()) {
        continue;
      }
      Group& group = groups[within];
      group.runs.push_back(&run);
      group.keep.assign(1, run.caches.back().keep(0));
    }
    // Also where nothing will be measured: what is an error does not depend on the policies.
    RowMeter meter(info_, finite_values(payload, layer));
    LayerWeights weights(info_, layer, info_.prompt, payload, options_.nan, where_);
    const auto stored_rows = static_cast<Index>(info_.prompt_rows.size());
    WeightBlock block;
    for (Index begin = 0; begin < stored_rows; begin += block_rows()) {
      weights.prompt({begin, std::min(stored_rows, begin + block_rows())}, block);
      meter.begin();
      for (const auto& [within, group] : groups) {
        observe(group, within, block, meter);
      }
      for (const std::unique_ptr<Merging>& merging : mergings) {
        observe_merged(*merging, block, meter);
      }
      progress_.add(block.rows());
    }
    for (ActiveRun& run : runs_) {
      count(weights, run.prefill);
    }
  }

  /// Rows of a block whose queries are not missing.
  static std::vector<Index> present_rows(const WeightBlock& block, const std::vector<Index>& within) {
    std::vector<Index> present;
    for (Index r = 0; r < block.rows(); ++r) {
      if (!std::ranges::binary_search(within, block.queries[at(r)])) {
        present.push_back(r);
      }
    }
    return present;
  }

  void observe(const Group& group, const std::vector<Index>& within, const WeightBlock& block,
               RowMeter& meter) {
    std::vector<Index> present = present_rows(block, within);
    if (present.empty()) {
      return;
    }
    const Rows rows(block, std::move(present), group.keep);
    for (Index r = 0; !within.empty() && r < rows.rows(); ++r) {
      const std::span<const RowMeter::Measured> measured = meter.measure(rows, r);
      for (ActiveRun* run : group.runs) {
        run->store_prompt_row(measured, rows.layer(), rows.query(r));
      }
    }
    for (ActiveRun* run : group.runs) {
      run->state->observe(rows);
    }
  }

  /// Runs that merged tokens of the layer, each with its keys and values.
  Mergings merging_runs(Index layer, LayerPayload& payload, Index keys) {
    Mergings mergings;
    for (ActiveRun& run : runs_) {
      const std::vector<Evict>& merged = run.merged[at(layer)];
      if (!merged.empty()) {
        mergings.push_back(std::unique_ptr<Merging>(
            new Merging{run,
                        MergedLayer(info_, layer, payload, run.policy->lanes(), merged, keys,
                                    run.within[at(layer)], options_.nan, where_),
                        {}}));
      }
    }
    return mergings;
  }

  void observe_merged(Merging& merging, const WeightBlock& block, RowMeter& meter) {
    const std::vector<std::span<const float>> keep{merging.run.caches.back().keep(0)};
    const std::vector<Index> present = present_rows(block, merging.run.within[at(block.layer)]);
    for (const Range& range : neighbours(present, block.rows())) {
      std::vector<Index> of_block(present.begin() + range.begin, present.begin() + range.end);
      std::vector<Index> of_own(of_block.size());
      std::iota(of_own.begin(), of_own.end(), Index{0});
      // A payload that merges stores every prompt row: the index of a row is its position.
      const Index first = block.queries[at(of_block.front())];
      merging.layer.weights().prompt({first, first + range.size()}, merging.block);
      const Rows full(block, std::move(of_block), keep);
      const Rows own(merging.block, std::move(of_own), keep);
      for (Index r = 0; r < own.rows(); ++r) {
        merging.run.store_prompt_row(meter.measure_merged(full, r, own, r, merging.layer.values()),
                                     block.layer, own.query(r));
      }
      merging.run.state->observe(own);
    }
  }

  void decode_layer(Index layer) {
    if (info_.steps() > 0) {
      decode_steps(layer);
    }
    for (ActiveRun& run : runs_) {
      run.decoding[at(layer)].reset();
    }
  }

  void decode_steps(Index layer) {
    const std::unique_ptr<LayerPayload> payload = sequence_.layer(layer);
    RowMeter meter(info_, finite_values(*payload, layer));
    LayerWeights weights(info_, layer, info_.tokens, *payload, options_.nan, where_);
    const Mergings mergings = merging_runs(layer, *payload, info_.tokens);
    WeightBlock block;
    for (Index begin = 1; begin <= info_.steps(); begin += block_rows()) {
      const Range steps{begin, std::min(info_.steps() + 1, begin + block_rows())};
      weights.decode(steps, block);
      meter.begin();
      for (const std::unique_ptr<Merging>& merging : mergings) {
        merging->layer.weights().decode(steps, merging->block);
      }
      for (Index r = 0; r < block.rows(); ++r) {
        decode_step(layer, begin + r, block, r, meter);
        for (const std::unique_ptr<Merging>& merging : mergings) {
          decode_merged(*merging, begin + r, block, r, meter);
        }
      }
      progress_.add(block.rows());
    }
    for (ActiveRun& run : runs_) {
      count(weights, run.decode[at(layer)]);
    }
  }

  void decode_step(Index layer, Index step, const WeightBlock& block, Index block_row, RowMeter& meter) {
    std::vector<std::vector<std::size_t>> groups;
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      if (!runs_[i].merged[at(layer)].empty()) {
        continue;
      }
      runs_[i].join(layer, step);
      const LayerCache& cache = runs_[i].caches[at(layer)];
      const auto same = std::ranges::find_if(groups, [&](const std::vector<std::size_t>& group) {
        return runs_[group.front()].caches[at(layer)].same_residents(cache);
      });
      (same == groups.end() ? groups.emplace_back() : *same).push_back(i);
    }
    for (const std::vector<std::size_t>& group : groups) {
      share_step(layer, step, Rows(block, {block_row}, runs_[group.front()].caches[at(layer)].keep_by_lane()),
                 meter, group);
    }
  }

  void decode_merged(Merging& merging, Index step, const WeightBlock& block, Index block_row,
                     RowMeter& meter) {
    ActiveRun& run = merging.run;
    const Index layer = block.layer;
    run.join(layer, step);
    const LayerCache& cache = run.caches[at(layer)];
    const Rows full(block, {block_row}, cache.keep_by_lane());
    const Rows own(merging.block, {block_row}, cache.keep_by_lane());
    run.store_decode_row(meter.measure_merged(full, 0, own, 0, merging.layer.values()), {}, layer, step);
    run.apply(run.decoding[at(layer)]->step(own, cache), layer, step);
  }

  /// One step of runs with equal residents: all of them decide before any cache changes.
  void share_step(Index layer, Index step, const Rows& row, RowMeter& meter,
                  const std::vector<std::size_t>& group) {
    const std::span<const RowMeter::Measured> measured = meter.measure(row, 0);
    const std::span<const double> top_now = meter.top_now(row, 0);
    std::vector<Decision> decisions;
    for (const std::size_t i : group) {
      ActiveRun& run = runs_[i];
      run.store_decode_row(measured, top_now, layer, step);
      decisions.push_back(run.decoding[at(layer)]->step(row, run.caches[at(layer)]));
    }
    for (std::size_t i = 0; i < group.size(); ++i) {
      runs_[group[i]].apply(decisions[i], layer, step);
    }
  }

  static void count(const LayerWeights& weights, Ledger& ledger) {
    ledger.masked_rows += weights.masked_rows();
    ledger.lowered_weights += weights.lowered();
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

  Sequence& sequence_;
  const SequenceInfo& info_;
  const ReplayOptions& options_;
  std::string where_;
  std::vector<ActiveRun> runs_;
  RowProgress progress_;
};

}  // namespace

void for_each(const ForEach& parallel, Index count, const std::function<void(Index)>& task) {
  if (parallel) {
    return parallel(count, task);
  }
  for (Index i = 0; i < count; ++i) {
    task(i);
  }
}

std::vector<RunResult> replay(Sequence& sequence, const std::vector<std::shared_ptr<const Policy>>& policies,
                              const ReplayOptions& options, const std::string& where) {
  HAE_EXPECTS(!policies.empty());
  check_floating_point_mode();
  return SequenceReplay(sequence, policies, options, where).run();
}

}  // namespace hae
