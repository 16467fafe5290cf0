#include "cuda/replay.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "cuda/eviction_pass.hpp"
#include "cuda/pruning_pass.hpp"
#include "sim/active_run.hpp"
#include "sim/row_kernels.hpp"

namespace hae::device {
namespace {

constexpr Index kRows = 32;  // of a block: what is gained by more is small, and memory grows with them

/// What layers must have in common to be on the device together.
using Kind = std::tuple<Payload, Index, Index, Index>;

Kind kind_of(const SequenceInfo& info) {
  const bool recomputes = info.payload == Payload::qkv;
  return {info.payload, info.query_heads, info.kv_heads, recomputes ? *info.head_dim : 0};
}

/// Replays the jobs of one call.
class Replay {
 public:
  Replay(std::span<const Job> jobs, const Options& options)
      : jobs_(jobs), options_(options), layers_(jobs.size()), runs_(jobs.size()) {
    for (std::size_t j = 0; j < jobs.size(); ++j) {
      const SequenceInfo& info = jobs[j].sequence->info();
      layers_[j].resize(at(info.layers));
      runs_[j].lanes = jobs[j].run.lanes;
    }
  }

  std::vector<DeviceRun> run() {
    const PolicyRun& policy = jobs_.front().run;
    if (policy.pruning) {
      for_each_wave([&](const LayerJob& job) { return job.layer == 0 || !policy.pruning->broadcast; },
                    PruningPass::kBytesPerToken,
                    [&](const std::vector<LayerJob>& wave, LayerBatch& batch) { prune(wave, batch); });
    }
    settle_limits();
    if (policy.eviction != Eviction::never) {
      evict(policy, false);
      evict(within_window(policy), true);
    }
    for (DeviceRun& run : runs_) {
      std::ranges::sort(run.log.entries, {},
                        [](const LogEntry& e) { return std::tuple(e.step, e.layer, e.lane, e.token); });
      std::ranges::sort(run.log.pending, {},
                        [](const PendingEntry& e) { return std::tuple(e.layer, e.lane, e.token); });
    }
    return std::move(runs_);
  }

 private:
  /// Calls work with as many layers at once as fit into memory, those of a job in order.
  template <typename Chooses, typename Work>
  void for_each_wave(const Chooses& chooses, Index token_bytes, const Work& work) {
    std::map<Kind, std::vector<LayerJob>> kinds;
    for (std::size_t j = 0; j < jobs_.size(); ++j) {
      const SequenceInfo& info = jobs_[j].sequence->info();
      for (Index layer = 0; layer < info.layers; ++layer) {
        const LayerJob job{&jobs_[j], layer, &layers_[j][at(layer)], &runs_[j]};
        if (chooses(job)) {
          kinds[kind_of(info)].push_back(job);
        }
      }
    }
    for (auto& [kind, layers] : kinds) {
      for (std::size_t begin = 0; begin < layers.size();) {
        BatchShape shape;
        const std::size_t count = fitting({layers.data() + begin, layers.size() - begin}, token_bytes, shape);
        const std::vector<LayerJob> wave(layers.begin() + static_cast<std::ptrdiff_t>(begin),
                                         layers.begin() + static_cast<std::ptrdiff_t>(begin + count));
        std::vector<BatchItem> items;
        for (const LayerJob& layer : wave) {
          items.push_back({layer.job->sequence, layer.layer,
                           layer.job->where + ": sequence '" + layer.info().name + "'"});
        }
        LayerBatch batch(std::move(items), shape, options_.nan, options_.stream);
        work(wave, batch);
        begin += count;
      }
    }
  }

  /// How many of the layers fit, at least one, and the shape they share.
  ///
  /// token_bytes  on the device for each token of each layer beside what the rows need
  std::size_t fitting(std::span<const LayerJob> layers, Index token_bytes, BatchShape& shape) const {
    constexpr Index kSlack = Index{4} << 20;  // alignment, and the work space of sorting
    const Index available = options_.memory_bytes > 0 ? options_.memory_bytes : free_bytes() / 10 * 9;
    const auto shape_of = [&](std::size_t count, Index rows) {
      const SequenceInfo& info = layers.front().info();
      BatchShape all{info.payload, info.query_heads, info.kv_heads, std::get<3>(kind_of(info)), 0, rows};
      for (const LayerJob& layer : layers.first(count)) {
        all.stride = std::max(all.stride, kernels::padded(layer.info().tokens));
      }
      return all;
    };
    const auto bytes = [&](std::size_t count, const BatchShape& all) {
      return static_cast<Index>(count) * (all.item_bytes() + token_bytes * all.stride) + kSlack;
    };
    shape = shape_of(1, kRows);
    if (bytes(1, shape) > available) {
      shape = shape_of(1, 1);
      if (bytes(1, shape) > available) {
        throw DeviceError("out of device memory: one layer of sequence '" + layers.front().info().name +
                          "' needs " + std::to_string(bytes(1, shape)) + " bytes, " +
                          std::to_string(available) + " are free; use --backend reference");
      }
      return 1;
    }
    std::size_t count = 1;
    while (count < layers.size() && bytes(count + 1, shape_of(count + 1, kRows)) <= available) {
      ++count;
    }
    shape = shape_of(count, kRows);
    return count;
  }

  /// Bytes on the device for each token of a layer in the eviction pass.
  [[nodiscard]] Index lane_bytes(const PolicyRun& policy) const {
    Index most = 0;
    for (const Job& job : jobs_) {
      most = std::max(most, EvictionPass::bytes_per_token(policy, job.sequence->info()));
    }
    return most;
  }

  void prune(const std::vector<LayerJob>& wave, LayerBatch& batch) {
    PruningPass(wave, batch, options_.stream).run();
    const Pruning& pruning = *jobs_.front().run.pruning;
    for (const LayerJob& layer : wave) {
      if (pruning.broadcast) {
        broadcast(layer, pruning.effect);
      }
      log_pruned(layer);
    }
  }

  /// What layer 0 evicts leaves the later layers too.
  void broadcast(const LayerJob& first, Effect effect) {
    std::vector<PrunedLayer>& layers = layers_[at(first.job - jobs_.data())];
    for (Index layer = 1; layer < first.info().layers; ++layer) {
      layers[at(layer)].pruned = layers.front().pruned;
      layers[at(layer)].within = effect == Effect::within;
      log_pruned({first.job, layer, &layers[at(layer)], first.run});
    }
  }

  static void log_pruned(const LayerJob& layer) {
    for (const PrunedToken& pruned : layer.pruned->pruned) {
      for (Index lane = 0; lane < lane_count(layer.info(), layer.job->run.lanes); ++lane) {
        layer.run->log.entries.push_back({.step = 0,
                                          .layer = layer.layer,
                                          .lane = logged_lane(layer.job->run.lanes, lane),
                                          .token = pruned.token,
                                          .within = layer.pruned->within,
                                          .score = pruned.score});
      }
    }
  }

  void settle_limits() {
    for (std::size_t j = 0; j < jobs_.size(); ++j) {
      const SequenceInfo& info = jobs_[j].sequence->info();
      for (Index layer = 0; layer < info.layers; ++layer) {
        Limits limits = jobs_[j].run.limits(info.prompt - std::ssize(layers_[j][at(layer)].pruned));
        // A short prompt may be all protected where decoding evicts nothing.
        if (limits.budget && !limits.grows && limits.sinks + limits.recent > *limits.budget) {
          throw ConfigError("policy '" + jobs_[j].run.spec + "': sequence '" + info.name + "', layer " +
                            std::to_string(layer) + ": sinks + recent = " +
                            std::to_string(limits.sinks + limits.recent) + " exceeds the budget of " +
                            std::to_string(*limits.budget) + " tokens; raise the budget or protect fewer");
        }
        const Index window = info.masks[at(layer)].window;
        const auto capped = limits.budget && window > 0 ? jobs_[j].run.capped(limits, window) : std::nullopt;
        limits = capped.value_or(limits);
        runs_[j].is_capped.push_back(capped.has_value());
        for (Index lane = 0; lane < lane_count(info, jobs_[j].run.lanes); ++lane) {
          runs_[j].limits.push_back(limits);
        }
      }
    }
  }

  /// What a policy does in a layer whose budget is capped: the oldest go, whatever it would choose.
  static PolicyRun within_window(PolicyRun policy) {
    policy.ranking = {.by = Ranking::By::age};
    policy.eviction = policy.eviction == Eviction::after_prefill ? policy.eviction : Eviction::every_step;
    return policy;
  }

  void evict(const PolicyRun& policy, bool is_capped) {
    for_each_wave([&](const LayerJob& job) { return job.is_capped() == is_capped; }, lane_bytes(policy),
                  [&](const std::vector<LayerJob>& wave, LayerBatch& batch) {
                    EvictionPass(policy, wave, batch, options_.stream).run();
                  });
  }

  std::span<const Job> jobs_;
  const Options& options_;
  std::vector<std::vector<PrunedLayer>> layers_;  ///< [jobs][layers]
  std::vector<DeviceRun> runs_;
};

}  // namespace

std::vector<DeviceRun> replay(std::span<const Job> jobs, const Options& options) {
  check_device();
  return jobs.empty() ? std::vector<DeviceRun>{} : Replay(jobs, options).run();
}

}  // namespace hae::device
