#include "cuda/eviction_pass.hpp"

#include <algorithm>

#include "cuda/draws.hpp"
#include "cuda/select_lowest.hpp"
#include "sim/active_run.hpp"

namespace hae::device {
namespace {

using By = Ranking::By;

/// An array that a policy needs, or none.
template <typename T>
Array<T> array_if(bool is_needed, Index count) {
  return is_needed ? Array<T>(count) : Array<T>();
}

}  // namespace

Index EvictionPass::bytes_per_token(const PolicyRun& policy, const SequenceInfo& info) {
  constexpr Index kNumbers =
      7;  // of a lane: its history (3), scores, ranking or draws, what is chosen, and one to spare
  constexpr Index kSelecting = 3;  // places, and as many again twice to sort them
  constexpr Index kFlags = 2;
  const Index heads = policy.ranking.by == By::last_rows ? info.query_heads : 0;
  const Index numbers =
      lane_count(info, policy.lanes) * (kNumbers + kSelecting) + heads + 1;  // and exposures
  return numbers * Index{sizeof(Index)} + lane_count(info, policy.lanes) * kFlags;
}

EvictionPass::EvictionPass(const PolicyRun& policy, const std::vector<LayerJob>& layers, LayerBatch& batch,
                           Stream stream)
    : layers_(layers),
      batch_(batch),
      stream_(stream),
      policy_(policy),
      lanes_of_layer_(lane_count(layers.front().info(), policy_.lanes)),
      stride_(batch.shape().stride),
      lanes_(at(batch.items() * lanes_of_layer_)),
      resident_(lanes() * stride_),
      pending_since_(lanes() * stride_),
      evicted_in_(lanes() * stride_),
      evicted_score_(lanes() * stride_),
      cache_{lanes(),
             stride_,
             resident_.data(),
             pending_since_.data(),
             evicted_in_.data(),
             evicted_score_.data()},
      scores_(array_if<double>(policy_.ranking.by != By::draw, lanes() * stride_)),
      ranking_(array_if<double>(policy_.ranking.divides_by_exposures, lanes() * stride_)),
      head_sums_(array_if<double>(policy_.ranking.by == By::last_rows,
                                  batch.items() * batch.shape().query_heads * stride_)),
      exposures_(array_if<Index>(policy_.ranking.divides_by_exposures, batch.items() * stride_)),
      draws_(array_if<std::uint64_t>(policy_.ranking.by == By::draw, lanes() * stride_)),
      eligible_(lanes() * stride_),
      sinks_(lanes()),
      recent_(lanes()),
      recent_begin_(lanes()),
      joins_(batch.shape().rows * lanes()),
      counts_(batch.shape().rows * lanes()),
      is_full_(batch.shape().rows * lanes()),
      chosen_(lanes() * stride_),
      selecting_(select_lowest_bytes(lanes(), stride_, stride_)) {}

void EvictionPass::run() {
  begin();
  observe_prompt();
  leave_pruned();
  fit();
  if (policy_.eviction != Eviction::after_prefill) {
    decode();
  }
  batch_.expect_finite();
  read_log();
}

/// Every prompt token is there but those that left within the prefill.
void EvictionPass::begin() {
  std::vector<std::uint8_t> resident(at(lanes() * stride_), 0);
  for (Index lane = 0; lane < lanes(); ++lane) {
    const LayerJob& layer = layers_[at(lane / lanes_of_layer_)];
    const SequenceInfo& info = layer.info();
    std::uint8_t* row = resident.data() + lane * stride_;
    std::fill_n(row, info.prompt, std::uint8_t{1});
    for (const PrunedToken& pruned : layer.pruned->pruned) {
      row[pruned.token] = layer.pruned->within ? 0 : 1;
    }
    lanes_[at(lane)] = {
        .limits = layer.run->limits[at(layer.layer * lanes_of_layer_ + lane % lanes_of_layer_)],
        .residents = info.prompt - std::ssize(layer.pruned->pruned),
        .steps = info.steps()};
  }
  resident_.write(resident, stream_);
  begin_lanes(cache_, stream_);
  scores_.clear(stream_);
  head_sums_.clear(stream_);
  exposures_.clear(stream_);
  std::vector<Index> sinks;
  std::vector<Index> recent;
  for (const Lane& lane : lanes_) {
    sinks.push_back(lane.limits.sinks);
    recent.push_back(lane.limits.recent);
  }
  sinks_.write(sinks, stream_);
  recent_.write(recent, stream_);
  if (policy_.ranking.by == By::draw) {
    draw();
  }
}

void EvictionPass::draw() {
  const auto bits = [](Index i) { return static_cast<std::uint64_t>(i); };
  std::vector<std::uint64_t> prefixes;
  for (Index lane = 0; lane < lanes(); ++lane) {
    const LayerJob& layer = layers_[at(lane / lanes_of_layer_)];
    prefixes.push_back(
        mix(mix(mix(layer.job->run.ranking.seed) ^ bits(layer.layer)) ^ bits(lane % lanes_of_layer_)));
  }
  const Array<std::uint64_t> on_device = copy_of(prefixes, stream_);
  draw_priorities(on_device.data(), lanes(), stride_, draws_.data(), stream_);
  synchronize(stream_);  // before the prefixes go
}

/// The prompt rows that the ranking is made of.
void EvictionPass::observe_prompt() {
  const By by = policy_.ranking.by;
  if (by == By::age || by == By::draw) {
    return;
  }
  std::vector<Index> first;
  std::vector<std::vector<bool>> is_absent;
  Index most = 0;
  for (const LayerJob& layer : layers_) {
    const SequenceInfo& info = layer.info();
    const Index newest = by == By::attention    ? info.prompt
                         : by == By::newest_row ? 1
                                                : policy_.ranking.window;
    const auto begin = std::ranges::lower_bound(info.prompt_rows, info.prompt - newest);
    first.push_back(begin - info.prompt_rows.begin());
    most = std::max(most, static_cast<Index>(info.prompt_rows.end() - begin));
    std::vector<bool>& absent = is_absent.emplace_back(at(info.prompt), false);
    for (const PrunedToken& pruned : layer.pruned->pruned) {
      absent[at(pruned.token)] = layer.pruned->within;
    }
  }
  const auto wants = [&](Index item, Index position) { return !is_absent[at(item)][at(position)]; };
  for (Index begin = 0; begin < most; begin += batch_.shape().rows) {
    add(batch_.form_prompt(first, begin, wants));
  }
  if (by == By::last_rows) {
    std::vector<Index> candidates;
    for (const LayerJob& layer : layers_) {
      candidates.push_back(std::max<Index>(0, layer.info().prompt - policy_.ranking.window));
    }
    const Array<Index> counts = copy_of(candidates, stream_);
    pool_scores(head_sums_.data(), batch_.items(), batch_.shape().query_heads, batch_.shape().kv_heads,
                stride_, counts.data(), policy_.ranking.pooling, scores_.data(), stream_);
    synchronize(stream_);  // before the counts go
  }
}

/// Adds the active rows of a block to the scores.
void EvictionPass::add(RowBlock block) {
  const Reduction& reduction = policy_.ranking.reduction;
  RowValues values{.heads = reduction.heads, .divisors = block.sums, .stride = stride_};
  if (reduction.attention == Attention::observed) {
    sum_residents(block, resident_.data(), lanes_of_layer_, stride_, batch_.workspace(), batch_.divisors(),
                  stream_);
    values.divisors = batch_.divisors();
    values.resident = resident_.data();
    values.resident_lanes = lanes_of_layer_;
  }
  if (policy_.ranking.by == By::last_rows) {
    add_rows(block, values, block.query_heads, head_sums_.data(), nullptr, stream_);
    return;
  }
  if (policy_.ranking.by == By::newest_row) {
    scores_.clear(stream_);
  }
  add_rows(block, values, reduction.lanes == LaneKind::layer ? 1 : block.kv_heads, scores_.data(),
           exposures_.data(), stream_);
}

/// What was pruned, and was still there in the prefill, leaves. The log has it already.
void EvictionPass::leave_pruned() {
  Index most = 0;
  for (const LayerJob& layer : layers_) {
    most = std::max(most, layer.pruned->within ? 0 : std::ssize(layer.pruned->pruned));
  }
  if (most == 0) {
    return;
  }
  std::vector<Index> tokens(at(lanes() * most), -1);
  for (Index lane = 0; lane < lanes(); ++lane) {
    const PrunedLayer& layer = *layers_[at(lane / lanes_of_layer_)].pruned;
    for (Index i = 0; i < std::ssize(layer.pruned) && !layer.within; ++i) {
      tokens[at(lane * most + i)] = layer.pruned[at(i)].token;
    }
  }
  chosen_.write(tokens, stream_);
  remove(cache_, {chosen_.data(), most}, stream_);
}

void EvictionPass::fit() {
  std::vector<Index> newest;
  std::vector<Index> counts;
  for (Index lane = 0; lane < lanes(); ++lane) {
    Lane& state = lanes_[at(lane)];
    newest.push_back(layers_[at(lane / lanes_of_layer_)].info().prompt - 1);
    counts.push_back(std::max<Index>(0, state.residents - *state.limits.budget));
    state.residents -= counts.back();
  }
  const Index most = std::ranges::max(counts);
  if (most == 0) {
    return;
  }
  joins_.write(newest, stream_);
  counts_.write(counts, stream_);
  choose(joins_.data(), counts_.data(), most);
  device::evict(cache_, {chosen_.data(), most}, logged_scores(), 0, stream_);
}

void EvictionPass::decode() {
  Index steps = 0;
  for (const Lane& lane : lanes_) {
    steps = std::max(steps, lane.steps);
  }
  const bool observes = policy_.ranking.by == By::attention || policy_.ranking.by == By::newest_row;
  const Index rows = batch_.shape().rows;
  for (Index begin = 1; begin <= steps; begin += rows) {
    const RowBlock block = observes ? batch_.form_decode(begin) : RowBlock{};
    std::vector<StepPlan> plans;
    std::vector<Index> joins;
    std::vector<Index> counts;
    std::vector<std::uint8_t> is_full;
    for (Index row = 0; row < rows && begin + row <= steps; ++row) {
      plans.push_back(plan_step(begin + row, joins, counts, is_full));
    }
    joins_.write(joins, stream_);
    counts_.write(counts, stream_);
    is_full_.write(is_full, stream_);
    for (Index row = 0; row < std::ssize(plans); ++row) {
      step(begin + row, row, block, plans[at(row)]);
    }
  }
}

/// How many tokens each lane takes in a step, added to the arrays; its sizes follow.
EvictionPass::StepPlan EvictionPass::plan_step(Index step, std::vector<Index>& joins,
                                               std::vector<Index>& counts,
                                               std::vector<std::uint8_t>& is_full) {
  StepPlan plan;
  for (Index i = 0; i < lanes(); ++i) {
    Lane& lane = lanes_[at(i)];
    if (step > lane.steps) {
      joins.push_back(-1);
      counts.push_back(0);
      is_full.push_back(0);
      continue;
    }
    const Taken taken = take(lane);
    joins.push_back(layers_[at(i / lanes_of_layer_)].info().prompt + step - 1);
    counts.push_back(taken.count);
    is_full.push_back(taken.empties ? 1 : 0);
    plan.most = std::max(plan.most, taken.count);
    plan.empties = plan.empties || taken.empties;
  }
  return plan;
}

/// A token joins the lane, and its rule takes what it must.
EvictionPass::Taken EvictionPass::take(Lane& lane) const {
  ++lane.residents;
  const Index budget = *lane.limits.budget;
  if (policy_.eviction == Eviction::mark) {
    // Fig. 1: mark one token a step, empty the bin when it is full.
    const Index marked = lane.residents - lane.pending > budget ? 1 : 0;
    lane.pending += marked;
    const bool empties = lane.pending == *lane.limits.bin;
    if (empties) {
      lane.residents -= std::exchange(lane.pending, 0);
    }
    return {marked, empties};
  }
  // Def. 2: when l + D tokens are resident, the D lowest go. Else all that is above the budget.
  const Index bin = policy_.eviction == Eviction::batch ? *lane.limits.bin : 1;
  const Index count = lane.residents >= budget + bin ? lane.residents - budget : 0;
  lane.residents -= count;
  return {count, false};
}

void EvictionPass::step(Index step, Index row, RowBlock block, const StepPlan& plan) {
  const Index* joins = joins_.data() + row * lanes();
  join(cache_, joins, stream_);
  if (block.items > 0) {
    block.active = {row, row + 1};
    add(block);
  }
  if (plan.most == 0) {
    return;
  }
  choose(joins, counts_.data() + row * lanes(), plan.most);
  const Chosen chosen{chosen_.data(), plan.most};
  if (policy_.eviction != Eviction::mark) {
    device::evict(cache_, chosen, logged_scores(), step, stream_);
    return;
  }
  mark(cache_, chosen, step, stream_);
  if (plan.empties) {
    empty_bins(cache_, is_full_.data() + row * lanes(), logged_scores(), step, stream_);
  }
}

/// Chooses the lowest eligible tokens of each lane.
void EvictionPass::choose(const Index* newest, const Index* counts, Index most) {
  find_eligible(cache_, {sinks_.data(), recent_.data(), newest}, recent_begin_.data(), eligible_.data(),
                stream_);
  if (policy_.ranking.divides_by_exposures) {
    divide_by_exposures(scores_.data(), exposures_.data(), batch_.items(), lanes_of_layer_, stride_,
                        ranking_.data(), stream_);
  }
  const auto select = [&](auto* scores) {
    using Score = std::remove_const_t<std::remove_pointer_t<decltype(scores)>>;
    select_lowest(
        LowestSelection<Score>{lanes(), stride_, scores, eligible_.data(), counts, most, chosen_.data()},
        selecting_.data(), stream_);
  };
  if (policy_.ranking.by == By::draw) {
    select(draws_.data());
  } else {
    select(policy_.ranking.divides_by_exposures ? ranking_.data() : scores_.data());
  }
}

/// What the log says of a token that leaves; null where the policy has no score.
const double* EvictionPass::logged_scores() const {
  const By by = policy_.ranking.by;
  if (by == By::age || by == By::draw) {
    return nullptr;
  }
  return policy_.ranking.divides_by_exposures ? ranking_.data() : scores_.data();
}

void EvictionPass::read_log() {
  const std::vector<Index> evicted_in = evicted_in_.read(stream_);
  const std::vector<Index> pending_since = pending_since_.read(stream_);
  const std::vector<double> scores = evicted_score_.read(stream_);
  const bool has_scores = logged_scores() != nullptr;
  for (Index lane = 0; lane < lanes(); ++lane) {
    const LayerJob& layer = layers_[at(lane / lanes_of_layer_)];
    const Index logged = logged_lane(policy_.lanes, lane % lanes_of_layer_);
    for (Index token = 0; token < layer.info().tokens; ++token) {
      const std::size_t place = at(lane * stride_ + token);
      const Index since = pending_since[place];
      if (evicted_in[place] >= 0) {
        layer.run->log.entries.push_back({.step = evicted_in[place],
                                          .layer = layer.layer,
                                          .lane = logged,
                                          .token = token,
                                          .score = has_scores ? std::optional(scores[place]) : std::nullopt,
                                          .pending_since = since >= 0 ? std::optional(since) : std::nullopt});
      } else if (since >= 0) {
        layer.run->log.pending.push_back({layer.layer, logged, token, since});
      }
    }
  }
}

}  // namespace hae::device
