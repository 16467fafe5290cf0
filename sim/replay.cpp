#include "sim/replay.hpp"

#include <algorithm>
#include <cfenv>
#include <limits>
#include <map>
#include <mutex>
#include <tuple>

#include "sim/arbiter.hpp"
#include "sim/row_kernels.hpp"
#include "sim/row_meter.hpp"

namespace hae {
namespace {

constexpr double kAbsent = std::numeric_limits<double>::quiet_NaN();

void for_each(const ForEach& parallel, Index count, const std::function<void(Index)>& task) {
  if (parallel) {
    return parallel(count, task);
  }
  for (Index i = 0; i < count; ++i) {
    task(i);
  }
}

/// Replays one sequence: all layers' prefill in order, then each layer's decode.
class SequenceReplay {
 public:
  SequenceReplay(Sequence& sequence, const std::vector<std::shared_ptr<const Policy>>& policies,
                 const ReplayOptions& options, const std::string& where)
      : sequence_(sequence),
        info_(sequence.info()),
        options_(options),
        where_(where + ": sequence '" + sequence.info().name + "'") {
    check_info(info_, where_);
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
      end_prefill(run);
    }
    decode();
    std::vector<RunResult> results;
    for (ActiveRun& run : runs_) {
      merge(run);
      finish(run);
      results.push_back(std::move(run.result));
    }
    return results;
  }

 private:
  using DecodeStates = std::vector<std::unique_ptr<LayerDecode>>;  ///< [runs], of one layer

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
      HAE_EXPECTS(options_.prompt_rows);
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
    run.decode.resize(at(info_.layers));
    const Index lanes = info_.layers * lane_count(info_, policy->lanes());
    run.result.attention_tokens.resize(at(lanes * info_.steps()));
    run.result.final_tokens.resize(at(lanes));
    run.result.decode = Series(info_.layers, info_.query_heads, info_.steps());
    run.result.top_now.assign(at(info_.layers * info_.query_heads * info_.steps()), kAbsent);
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
    for (ActiveRun& run : runs_) {
      begin_layer(run, layer);
    }
    if (options_.prompt_rows) {
      observe_prompt(layer);
    }
    for (ActiveRun& run : runs_) {
      Arbiter arbiter(run, info_, run.prefill);
      arbiter.deferred(layer);
      arbiter.prefill(run.state->prune(layer, run.caches.back()), Moment::prune, layer);
      arbiter.prefill(run.state->fit(layer, run.caches.back()), Moment::fit, layer);
    }
  }

  void observe_prompt(Index layer) {
    const std::unique_ptr<LayerPayload> payload = sequence_.layer(layer);
    std::map<std::vector<Index>, Group> groups;  // by the tokens that are missing within this prefill
    for (ActiveRun& run : runs_) {
      const std::vector<Index>& within = run.within[at(layer)];
      Group& group = groups[within];
      group.runs.push_back(&run);
      group.keep.assign(1, run.caches.back().keep(0));
      if (!within.empty() && run.result.prefill.layers == 0) {
        run.result.prefill = Series(info_.layers, info_.query_heads, info_.prompt);
      }
    }
    // Also where nothing will be measured: what is an error does not depend on the policies.
    RowMeter meter(info_, finite_values(*payload, layer));
    LayerWeights weights(info_, layer, info_.prompt, *payload, options_.nan, where_);
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
    for (ActiveRun& run : runs_) {
      count(weights, run.prefill);
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

  /// Decides what spans layers, then holds the policy to its limits.
  void end_prefill(ActiveRun& run) {
    Arbiter arbiter(run, info_, run.prefill);
    arbiter.prefill(run.state->balance(run.caches), Moment::balance, info_.layers - 1);
    for (Index layer = 0; layer < info_.layers; ++layer) {
      run.result.limits.push_back(run.state->limits(layer));
    }
    for (Index layer = 0; layer < info_.layers; ++layer) {
      arbiter.check_capacity(0, layer);
    }
  }

  void observe(const Group& group, const std::vector<Index>& within, const WeightBlock& block,
               RowMeter& meter) {
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
        store(measured, run->result.prefill, rows.layer(), rows.query(r), run->prefill);
      }
    }
    for (ActiveRun* run : group.runs) {
      run->state->observe(rows);
    }
  }

  /// Layers share nothing in decoding: each writes into its own caches, ledgers and parts of the results.
  void decode() {
    std::vector<DecodeStates> states(at(info_.layers));
    for (Index layer = 0; layer < info_.layers; ++layer) {
      for (ActiveRun& run : runs_) {
        states[at(layer)].push_back(run.state->decode(layer));
      }
    }
    for_each(options_.for_each, info_.layers, [&](Index layer) {
      decode_layer(layer, states[at(layer)]);
      states[at(layer)].clear();
    });
  }

  void decode_layer(Index layer, DecodeStates& states) {
    if (info_.steps() > 0) {
      decode_steps(layer, states);
    }
    for (ActiveRun& run : runs_) {
      const LayerCache& cache = run.caches[at(layer)];
      for (Index lane = 0; lane < cache.lanes(); ++lane) {
        run.result.final_tokens[at(layer * cache.lanes() + lane)] = cache.residents(lane);
      }
    }
  }

  void decode_steps(Index layer, DecodeStates& states) {
    const std::unique_ptr<LayerPayload> payload = sequence_.layer(layer);
    RowMeter meter(info_, finite_values(*payload, layer));
    LayerWeights weights(info_, layer, info_.tokens, *payload, options_.nan, where_);
    WeightBlock block;
    for (Index begin = 1; begin <= info_.steps(); begin += block_rows()) {
      weights.decode({begin, std::min(info_.steps() + 1, begin + block_rows())}, block);
      meter.begin();
      for (Index r = 0; r < block.rows(); ++r) {
        decode_step(layer, begin + r, block, r, meter, states);
      }
      report(block.rows());
    }
    for (ActiveRun& run : runs_) {
      count(weights, run.decode[at(layer)]);
    }
  }

  void decode_step(Index layer, Index step, const WeightBlock& block, Index block_row, RowMeter& meter,
                   DecodeStates& states) {
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
      share_step(layer, step, Rows(block, {block_row}, lanes_of(runs_[group.front()].caches[at(layer)])),
                 meter, group, states);
    }
  }

  /// One step of runs with equal residents: all of them decide before any cache changes.
  void share_step(Index layer, Index step, const Rows& row, RowMeter& meter,
                  const std::vector<std::size_t>& group, DecodeStates& states) {
    const std::span<const RowMeter::Measured> measured = meter.measure(row, 0);
    const std::span<const double> top_now = meter.top_now(row, 0);
    std::vector<Decision> decisions;
    for (const std::size_t i : group) {
      RunResult& result = runs_[i].result;
      store(measured, result.decode, layer, step - 1, runs_[i].decode[at(layer)]);
      for (Index h = 0; h < info_.query_heads; ++h) {
        result.top_now[at((layer * info_.query_heads + h) * info_.steps() + step - 1)] = top_now[at(h)];
      }
      decisions.push_back(states[i]->step(row, runs_[i].caches[at(layer)]));
    }
    for (std::size_t i = 0; i < group.size(); ++i) {
      ActiveRun& run = runs_[group[i]];
      Arbiter(run, info_, run.decode[at(layer)]).decode(decisions[i], step, layer);
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
                    Ledger& ledger) {
    for (Index h = 0; h < series.query_heads; ++h) {
      const RowMeter::Measured& m = measured[at(h)];
      series.at(Metric::missed_mass, layer, h, row) = m.missed_mass;
      series.at(Metric::kl, layer, h, row) = m.kl;
      series.at(Metric::output_error, layer, h, row) = m.output_error;
      series.at(Metric::output_error_relative, layer, h, row) = m.output_error_relative;
      ledger.removed_all_rows += m.removed_all ? 1 : 0;
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

  void report(Index rows) {
    if (!options_.progress) {
      return;
    }
    const Index prompt = options_.prompt_rows ? static_cast<Index>(info_.prompt_rows.size()) : 0;
    const std::scoped_lock lock(progress_mutex_);
    rows_done_ += rows;
    options_.progress(static_cast<double>(rows_done_) /
                      static_cast<double>(info_.layers * (prompt + info_.steps())));
  }

  /// Brings the parts of a run together, in the order of layers.
  static void merge(ActiveRun& run) {
    RunResult& result = run.result;
    const auto add = [&](Ledger& part) {
      result.log.entries.insert(result.log.entries.end(), part.entries.begin(), part.entries.end());
      std::ranges::move(part.warnings, std::back_inserter(result.warnings));
      result.removed_all_rows += part.removed_all_rows;
      result.masked_rows += part.masked_rows;
      result.lowered_weights += part.lowered_weights;
    };
    add(run.prefill);
    std::ranges::for_each(run.decode, add);
    std::ranges::sort(result.log.entries, {},
                      [](const LogEntry& e) { return std::tuple(e.step, e.layer, e.lane, e.token); });
  }

  void finish(ActiveRun& run) const {
    RunResult& result = run.result;
    for (Index layer = 0; layer < info_.layers; ++layer) {
      const LayerCache& cache = run.caches[at(layer)];
      for (Index lane = 0; lane < cache.lanes(); ++lane) {
        std::vector<Index> pending(cache.pending(lane).begin(), cache.pending(lane).end());
        std::ranges::sort(pending);
        for (const Index token : pending) {
          result.log.pending.push_back(
              {layer, logged_lane(cache.kind(), lane), token, cache.pending_since(lane, token)});
        }
      }
    }
    result.moved = count_moved(info_, result.log);
    note_count(result, "NaN or infinite weights counted as 0", result.lowered_weights);
    note_count(result, "masked rows, which attend to nothing", result.masked_rows);
    note_count(result, "rows that lost all their attention mass", result.removed_all_rows);
    warn_if_nothing_generated_stays(run);
  }

  static void note_count(RunResult& result, const char* what, Index count) {
    if (count > 0) {
      result.warnings.push_back(std::string(what) + ": " + std::to_string(count));
    }
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
      run.result.warnings.push_back("0 of " + std::to_string(info_.steps()) +
                                    " generated tokens retained in " + std::to_string(bare) + " of " +
                                    std::to_string(lanes) + " lanes");
    }
  }

  Sequence& sequence_;
  const SequenceInfo& info_;
  const ReplayOptions& options_;
  std::string where_;
  std::vector<ActiveRun> runs_;
  std::mutex progress_mutex_;
  Index rows_done_ = 0;
};

/// The canonical arithmetic needs the processor's default mode; a host program, or a library beside us, may
/// have changed it.
void check_floating_point_mode() {
  volatile float smallest = std::numeric_limits<float>::min();
  if (smallest * 0.5f == 0.0f || std::fegetround() != FE_TONEAREST) {
    throw ContractViolation(
        "floating point does not round to nearest with gradual underflow: some part of this process "
        "set flush-to-zero or another rounding mode");
  }
}

}  // namespace

std::vector<RunResult> replay(Sequence& sequence, const std::vector<std::shared_ptr<const Policy>>& policies,
                              const ReplayOptions& options, const std::string& where) {
  HAE_EXPECTS(!policies.empty());
  check_floating_point_mode();
  return SequenceReplay(sequence, policies, options, where).run();
}

}  // namespace hae
