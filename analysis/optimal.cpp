#include "analysis/optimal.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "analysis/least_loss.hpp"
#include "sim/arbiter.hpp"
#include "sim/logged_policy.hpp"

namespace hae::analysis {
namespace {

/// A lane and its residents at the attention of each step.
struct Demand {
  Index layer;
  LaneKind kind;
  Index lane;
  std::vector<Index> residents;  ///< [steps]

  auto operator<=>(const Demand&) const = default;
};

/// What is asked for, by demand; filled in by the search. Layers write to entries of their own.
using Evictions = std::map<Demand, std::vector<TimedEviction>>;

std::vector<Demand> demands_of(const SequenceInfo& info, const RunResult& run) {
  std::vector<Demand> demands;
  const Index lanes = lane_count(info, run.lanes);
  for (Index layer = 0; layer < info.layers; ++layer) {
    for (Index lane = 0; lane < lanes; ++lane) {
      const auto begin = run.attention_tokens.begin() + (layer * lanes + lane) * info.steps();
      demands.push_back({layer, run.lanes, lane, {begin, begin + info.steps()}});
    }
  }
  return demands;
}

/// Attention that the decode steps pay to each token, summed over the query heads of a lane.
struct LaneMass {
  LaneKind kind;
  Index lane;
  std::vector<double> mass;  ///< [steps, T]
};

/// Collects a layer's attention and, in its last step, solves what is asked for of the layer.
class LayerSearch final : public LayerDecode {
 public:
  LayerSearch(const SequenceInfo& info, Index layer, const std::set<LaneKind>& kinds, Evictions& evictions)
      : info_(info), layer_(layer), evictions_(evictions) {
    for (const LaneKind kind : kinds) {
      for (Index lane = 0; lane < lane_count(info, kind); ++lane) {
        lanes_.push_back({kind, lane, {}});
      }
    }
  }

  Decision step(const Rows& row, const LayerCache& /*cache*/) override {
    const Index step = row.query(0) - info_.prompt + 1;
    for (LaneMass& lane : lanes_) {
      lane.mass.resize(at(info_.steps() * info_.tokens));
      const Reduction reduction{lane.kind, HeadReduction::sum, Attention::full};
      const std::span<const double> values = row.values(reduction, lane.lane, 0);
      std::copy_n(values.begin(), info_.prompt + step, lane.mass.begin() + (step - 1) * info_.tokens);
    }
    if (step == info_.steps()) {
      solve();
    }
    return {};
  }

 private:
  void solve() {
    for (auto& entry : evictions_) {
      const Demand& demand = entry.first;
      if (demand.layer != layer_) {
        continue;
      }
      const auto lane = std::ranges::find_if(
          lanes_, [&](const LaneMass& l) { return l.kind == demand.kind && l.lane == demand.lane; });
      entry.second =
          least_loss_evictions(View<const double, 2>(lane->mass.data(), {info_.steps(), info_.tokens}),
                               info_.prompt, demand.residents);
    }
    lanes_.clear();
  }

  const SequenceInfo& info_;
  Index layer_;
  Evictions& evictions_;
  std::vector<LaneMass> lanes_;
};

/// Evicts nothing and watches.
class Search final : public Policy {
 public:
  Search(std::set<LaneKind> kinds, Evictions& evictions) : kinds_(std::move(kinds)), evictions_(evictions) {}

  [[nodiscard]] std::string spec() const override { return "optimal"; }
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> options() const override { return {}; }
  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override { return {}; }
  [[nodiscard]] std::unique_ptr<Run> begin(const SequenceInfo& info) const override {
    return std::make_unique<State>(*this, info);
  }

 private:
  struct State final : Run {
    State(const Search& of_search, const SequenceInfo& of_sequence) : search(of_search), info(of_sequence) {}
    std::unique_ptr<LayerDecode> decode(Index layer) override {
      return std::make_unique<LayerSearch>(info, layer, search.kinds_, search.evictions_);
    }
    [[nodiscard]] Limits limits(Index /*layer*/, Index /*lane*/) const override { return {}; }

    const Search& search;
    const SequenceInfo& info;
  };

  std::set<LaneKind> kinds_;
  Evictions& evictions_;
};

EvictionLog log_of(const std::vector<Demand>& demands, const Evictions& evictions) {
  EvictionLog log;
  for (const Demand& demand : demands) {
    for (const TimedEviction& eviction : evictions.at(demand)) {
      log.entries.push_back({eviction.step,
                             demand.layer,
                             logged_lane(demand.kind, demand.lane),
                             eviction.token,
                             false,
                             {},
                             {},
                             {}});
    }
  }
  return log;
}

/// Bytes that one layer's search takes: the attention of every lane, and the solver's suffix sums of one.
WideIndex search_bytes(const SequenceInfo& info, const std::set<LaneKind>& kinds) {
  WideIndex lanes = 1;
  for (const LaneKind kind : kinds) {
    lanes += lane_count(info, kind);
  }
  return lanes * info.steps() * info.tokens * Index{sizeof(double)};
}

}  // namespace

std::vector<std::optional<double>> optimal_totals(Sequence& sequence, std::span<const RunResult> runs,
                                                  const ReplayOptions& options, const std::string& where) {
  const SequenceInfo& info = sequence.info();
  std::set<LaneKind> kinds;
  for (const RunResult& run : runs) {
    kinds.insert(run.lanes);
  }
  std::vector<std::optional<double>> totals(runs.size());
  if (info.steps() == 0 || search_bytes(info, kinds) > kMostSearchBytes) {
    return totals;
  }
  Evictions evictions;
  std::map<std::vector<Demand>, std::vector<std::size_t>> equal_runs;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (runs[i].merges) {
      continue;  // It has no masses to bound.
    }
    const std::vector<Demand> demands = demands_of(info, runs[i]);
    for (const Demand& demand : demands) {
      evictions.try_emplace(demand);
    }
    equal_runs[demands].push_back(i);
  }
  if (equal_runs.empty()) {
    return totals;
  }
  ReplayOptions again = options;
  again.prompt_rows = false;
  replay(sequence, {std::make_shared<Search>(kinds, evictions)}, again, where);

  std::vector<std::shared_ptr<const Policy>> logs;
  for (const auto& [demands, members] : equal_runs) {
    logs.push_back(logged_policy({"optimal", {}, where, demands.front().kind, log_of(demands, evictions)}));
  }
  const std::vector<RunResult> replayed = replay(sequence, logs, again, where);
  std::size_t next = 0;
  for (const auto& [demands, members] : equal_runs) {
    const double total = missed_mass_total(replayed[next++].decode);
    for (const std::size_t i : members) {
      totals[i] = total;
    }
  }
  return totals;
}

}  // namespace hae::analysis
