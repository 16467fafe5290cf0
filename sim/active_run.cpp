#include "sim/active_run.hpp"

#include <algorithm>
#include <cfenv>
#include <limits>
#include <tuple>

#include "sim/arbiter.hpp"

namespace hae {
namespace {

constexpr double kAbsent = std::numeric_limits<double>::quiet_NaN();

void store(std::span<const RowMeter::Measured> measured, bool outputs_only, Series& series, Index layer,
           Index row, Ledger& ledger) {
  for (Index h = 0; h < series.query_heads; ++h) {
    const RowMeter::Measured& m = measured[at(h)];
    if (!outputs_only) {
      series.at(Metric::missed_mass, layer, h, row) = m.missed_mass;
      series.at(Metric::missed_pull, layer, h, row) = m.missed_pull;
      series.at(Metric::kl, layer, h, row) = m.kl;
    }
    series.at(Metric::output_error, layer, h, row) = m.output_error;
    series.at(Metric::output_error_relative, layer, h, row) = m.output_error_relative;
    ledger.removed_all_rows += m.removed_all ? 1 : 0;
  }
}

/// Keeps the first `kept` entries of each of an array's rows of `length`.
template <typename Value>
void shorten_rows(std::vector<Value>& array, Index length, Index kept) {
  if (length == kept) {
    return;
  }
  std::vector<Value> shorter;
  for (auto row = array.begin(); row != array.end(); row += length) {
    shorter.insert(shorter.end(), row, row + kept);
  }
  array = std::move(shorter);
}

void keep_first_steps(RunResult& result, Index kept) {
  const Index length = result.decode.rows;
  result.decode.rows = kept;
  for (std::vector<double>& metric : result.decode.values) {
    shorten_rows(metric, length, kept);
  }
  shorten_rows(result.top_now, length, kept);
  shorten_rows(result.attention_tokens, length, kept);
}

void merge(Ledger& part, RunResult& result) {
  result.log.entries.insert(result.log.entries.end(), part.entries.begin(), part.entries.end());
  std::ranges::move(part.warnings, std::back_inserter(result.warnings));
  result.removed_all_rows += part.removed_all_rows;
  result.masked_rows += part.masked_rows;
  result.lowered_weights += part.lowered_weights;
}

void list_pending(const LayerCache& cache, Index layer, RunResult& result) {
  for (Index lane = 0; lane < cache.lanes(); ++lane) {
    std::vector<Index> pending(cache.pending(lane).begin(), cache.pending(lane).end());
    std::ranges::sort(pending);
    for (const Index token : pending) {
      result.log.pending.push_back(
          {layer, logged_lane(cache.kind(), lane), token, cache.pending_since(lane, token)});
    }
  }
}

void note_count(RunResult& result, const char* what, Index count) {
  if (count > 0) {
    result.warnings.push_back(std::string(what) + ": " + std::to_string(count));
  }
}

void warn_if_nothing_generated_stays(const std::vector<LayerCache>& caches, Index prompt, Index steps,
                                     RunResult& result) {
  Index lanes = 0;
  Index bare = 0;
  for (const LayerCache& cache : caches) {
    for (Index lane = 0; lane < cache.lanes(); ++lane) {
      bool retains = false;
      for (Index token = prompt; token < cache.joined() && !retains; ++token) {
        retains = cache.is_resident(lane, token);
      }
      ++lanes;
      bare += retains ? 0 : 1;
    }
  }
  if (steps > 0 && bare > 0) {
    result.warnings.push_back("0 of " + std::to_string(steps) + " generated tokens retained in " +
                              std::to_string(bare) + " of " + std::to_string(lanes) + " lanes");
  }
}

}  // namespace

ActiveRun::ActiveRun(std::shared_ptr<const Policy> run_policy, const SequenceInfo& sequence_info)
    : policy(std::move(run_policy)), info(sequence_info), state(policy->begin(info)) {
  within.resize(at(info.layers));
  merged.resize(at(info.layers));
  after.resize(at(info.layers));
  caches.reserve(at(info.layers));
  decode.resize(at(info.layers));
  result.lanes = policy->lanes();
  result.merges = policy->merges();
  const Index lanes = info.layers * lane_count(info, policy->lanes());
  result.attention_tokens.resize(at(lanes * info.steps()));
  result.decode = Series(info.layers, info.query_heads, info.steps());
  result.top_now.assign(at(info.layers * info.query_heads * info.steps()), kAbsent);
}

void ActiveRun::begin_layer(Index layer) {
  LayerCache& cache = caches.emplace_back(info, policy->lanes());
  auto missing = within[at(layer)].begin();
  for (Index token = 0; token < info.prompt; ++token) {
    if (missing != within[at(layer)].end() && *missing == token) {
      cache.skip(token);
      ++missing;
    } else {
      cache.join(token);
    }
  }
  result.prefill_tokens += cache.residents(0) * cache.lanes();
}

void ActiveRun::show_vectors(Index layer, LayerPayload& payload) {
  const Needs needs = policy->needs(info, layer);
  LayerVectors vectors;
  if (needs.keys) {
    vectors.keys = payload.keys();
  }
  if (needs.values) {
    vectors.values = payload.values();
  }
  if (needs.unrotated_queries) {
    unrotated_queries.resize(at(info.query_heads * info.prompt * *info.head_dim));
    const View<float, 3> read{unrotated_queries.data(), {info.query_heads, info.prompt, *info.head_dim}};
    payload.read_unrotated_queries({0, info.prompt}, read);
    vectors.unrotated_queries = read;
  }
  if (needs.embedding_similarity) {
    vectors.embedding_similarity = payload.embedding_similarity();
  }
  state->begin_layer(layer, vectors);
}

void ActiveRun::end_layer_prefill(Index layer) {
  Arbiter arbiter(*this, prefill);
  arbiter.deferred(layer);
  arbiter.prefill(state->prune(layer, caches.back()), Moment::prune, layer);
  arbiter.prefill(state->fit(layer, caches.back()), Moment::fit, layer);
}

void ActiveRun::end_prefill() {
  Arbiter arbiter(*this, prefill);
  arbiter.prefill(state->balance(caches), Moment::balance, info.layers - 1);
  std::vector<Limits> promised;
  for (Index layer = 0; layer < info.layers; ++layer) {
    for (Index lane = 0; lane < caches[at(layer)].lanes(); ++lane) {
      promised.push_back(state->limits(layer, lane));
    }
  }
  result.limits = std::move(promised);
  for (Index layer = 0; layer < info.layers; ++layer) {
    arbiter.check_capacity(0, layer);
  }
  for (Index layer = 0; layer < info.layers; ++layer) {
    decoding.push_back(state->decode(layer));
  }
}

Limits ActiveRun::limits(Index layer, Index lane) const {
  return result.limits.empty() ? state->limits(layer, lane)
                               : result.limits[at(layer * lane_count(info, policy->lanes()) + lane)];
}

void ActiveRun::join(Index layer, Index step) {
  LayerCache& cache = caches[at(layer)];
  cache.join(info.prompt + step - 1);
  for (Index lane = 0; lane < cache.lanes(); ++lane) {
    result.attention_tokens[at((layer * cache.lanes() + lane) * info.steps() + step - 1)] =
        cache.residents(lane);
  }
}

void ActiveRun::store_prompt_row(std::span<const RowMeter::Measured> measured, Index layer, Index position) {
  store(measured, result.merges, result.prefill, layer, position, prefill);
}

void ActiveRun::store_decode_row(std::span<const RowMeter::Measured> measured,
                                 std::span<const double> top_now, Index layer, Index step) {
  store(measured, result.merges, result.decode, layer, step - 1, decode[at(layer)]);
  for (Index h = 0; h < info.query_heads && !result.merges; ++h) {
    result.top_now[at((layer * info.query_heads + h) * info.steps() + step - 1)] = top_now[at(h)];
  }
}

void ActiveRun::apply(const Decision& decision, Index layer, Index step) {
  Arbiter(*this, decode[at(layer)]).decode(decision, step, layer);
}

RunResult ActiveRun::finish(Index steps) {
  decoding.clear();
  keep_first_steps(result, steps);
  merge(prefill, result);
  for (Ledger& layer : decode) {
    merge(layer, result);
  }
  std::ranges::sort(result.log.entries, {},
                    [](const LogEntry& e) { return std::tuple(e.step, e.layer, e.lane, e.token); });
  for (Index layer = 0; layer < info.layers; ++layer) {
    const LayerCache& cache = caches[at(layer)];
    for (Index lane = 0; lane < cache.lanes(); ++lane) {
      result.final_tokens.push_back(cache.residents(lane));
    }
    list_pending(cache, layer, result);
  }
  result.moved = count_moved(info, result.log);
  note_count(result, "NaN or infinite weights counted as 0", result.lowered_weights);
  note_count(result, "masked rows, which attend to nothing", result.masked_rows);
  note_count(result, "rows that lost all their attention mass", result.removed_all_rows);
  warn_if_nothing_generated_stays(caches, info.prompt, steps, result);
  return std::move(result);
}

void check_floating_point_mode() {
  volatile float smallest = std::numeric_limits<float>::min();
  if (smallest * 0.5f == 0.0f || std::fegetround() != FE_TONEAREST) {
    throw ContractViolation(
        "floating point does not round to nearest with gradual underflow: some part of this process "
        "set flush-to-zero or another rounding mode");
  }
}

}  // namespace hae
