#include "sim/metrics.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>

namespace hae {
namespace {

Index kv_heads_of_lane(const SequenceInfo& info, const RunResult& run) {
  return run.lanes == LaneKind::layer ? info.kv_heads : 1;
}

Index lanes_of(const SequenceInfo& info, const RunResult& run) {
  return info.layers * lane_count(info, run.lanes);
}

/// The tokens that each lane lost, ascending. [layers * lanes]
std::vector<std::vector<Index>> evicted_by_lane(const SequenceInfo& info, const RunResult& run) {
  std::vector<std::vector<Index>> evicted(at(lanes_of(info, run)));
  for (const LogEntry& entry : run.log.entries) {
    const Index lane = entry.lane == kLayerLane ? 0 : entry.lane;
    evicted[at(entry.layer * lane_count(info, run.lanes) + lane)].push_back(entry.token);
  }
  for (std::vector<Index>& tokens : evicted) {
    std::ranges::sort(tokens);
  }
  return evicted;
}

/// Jaccard index of what two lanes of a sequence hold, from what they lost, ascending.
double kept_jaccard(Index tokens, const std::vector<Index>& first, const std::vector<Index>& second) {
  std::vector<Index> lost_by_both;
  std::ranges::set_intersection(first, second, std::back_inserter(lost_by_both));
  const auto both = static_cast<Index>(lost_by_both.size());
  const Index held_by_any = tokens - both;
  const Index held_by_both = held_by_any - (static_cast<Index>(first.size() + second.size()) - 2 * both);
  return held_by_any == 0 ? 1.0 : static_cast<double>(held_by_both) / static_cast<double>(held_by_any);
}

}  // namespace

const char* name(Metric metric) {
  constexpr std::array kNames = {"missed_mass", "missed_pull", "kl", "output_error", "output_error_relative"};
  return kNames[static_cast<std::size_t>(metric)];
}

Series::Series(Index layer_count, Index head_count, Index row_count)
    : layers(layer_count), query_heads(head_count), rows(row_count) {
  for (std::vector<double>& metric : values) {
    metric.assign(static_cast<std::size_t>(layers * query_heads * rows),
                  std::numeric_limits<double>::quiet_NaN());
  }
}

double& Series::at(Metric metric, Index layer, Index head, Index row) {
  return values[static_cast<std::size_t>(metric)]
               [static_cast<std::size_t>((layer * query_heads + head) * rows + row)];
}

std::span<const double> Series::layer(Metric metric, Index layer) const {
  const auto size = static_cast<std::size_t>(query_heads * rows);
  return all(metric).subspan(static_cast<std::size_t>(layer) * size, size);
}

std::span<const double> Series::all(Metric metric) const {
  return values[static_cast<std::size_t>(metric)];
}

std::optional<Summary> summarise(std::span<const double> values) {
  std::vector<double> population;
  std::ranges::copy_if(values, std::back_inserter(population), [](double v) { return !std::isnan(v); });
  if (population.empty()) {
    return std::nullopt;
  }
  const auto n = static_cast<double>(population.size());
  Summary summary;
  summary.mean = std::accumulate(population.begin(), population.end(), 0.0) / n;
  std::ranges::sort(population);
  const auto nearest_rank = [&](std::size_t percent) {
    return population[(population.size() * percent + 99) / 100 - 1];
  };
  summary.max = population.back();
  summary.p50 = nearest_rank(50);
  summary.p95 = nearest_rank(95);
  return summary;
}

const char* name(TokenKind kind) {
  constexpr std::array kNames = {"visual", "text_before", "text_after", "generated"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::vector<TokenKind> token_kinds(const SequenceInfo& info) {
  Index first_visual = 0;
  while (first_visual < info.prompt && !info.is_visual(first_visual)) {
    ++first_visual;
  }
  const Index before_end = first_visual < info.prompt ? first_visual : 0;
  std::vector<TokenKind> kinds;
  for (Index token = 0; token < info.tokens; ++token) {
    kinds.push_back(token >= info.prompt    ? TokenKind::generated
                    : info.is_visual(token) ? TokenKind::visual
                    : token < before_end    ? TokenKind::text_before
                                            : TokenKind::text_after);
  }
  return kinds;
}

ByKind<Index> count_evicted_kinds(const SequenceInfo& info, const EvictionLog& log) {
  const std::vector<TokenKind> kinds = token_kinds(info);
  ByKind<Index> counts{};
  for (const LogEntry& entry : log.entries) {
    ++counts[static_cast<std::size_t>(kinds[at(entry.token)])];
  }
  return counts;
}

ByKind<std::optional<double>> kept_kinds(const SequenceInfo& info, const RunResult& run) {
  ByKind<Index> tokens{};
  for (const TokenKind kind : token_kinds(info)) {
    tokens[static_cast<std::size_t>(kind)] += lanes_of(info, run);
  }
  const ByKind<Index> evicted = count_evicted_kinds(info, run.log);
  ByKind<std::optional<double>> kept;
  for (std::size_t k = 0; k < kept.size(); ++k) {
    if (tokens[k] > 0) {
      kept[k] = static_cast<double>(tokens[k] - evicted[k]) / static_cast<double>(tokens[k]);
    }
  }
  return kept;
}

std::vector<std::vector<double>> kept_overlap(const SequenceInfo& info, std::span<const RunResult> runs) {
  std::vector<std::vector<std::vector<Index>>> evicted;
  for (const RunResult& run : runs) {
    evicted.push_back(evicted_by_lane(info, run));
  }
  const auto mean = [&](std::size_t a, std::size_t b) {
    const Index finest = std::max(lane_count(info, runs[a].lanes), lane_count(info, runs[b].lanes));
    const auto lost = [&](std::size_t run, Index layer, Index lane) -> const std::vector<Index>& {
      const Index lanes = lane_count(info, runs[run].lanes);
      return evicted[run][at(layer * lanes + (lanes == 1 ? 0 : lane))];
    };
    double sum = 0.0;
    for (Index layer = 0; layer < info.layers; ++layer) {
      for (Index lane = 0; lane < finest; ++lane) {
        sum += kept_jaccard(info.tokens, lost(a, layer, lane), lost(b, layer, lane));
      }
    }
    return sum / static_cast<double>(info.layers * finest);
  };
  std::vector<std::vector<double>> overlap(runs.size(), std::vector<double>(runs.size(), 1.0));
  for (std::size_t a = 0; a < runs.size(); ++a) {
    for (std::size_t b = a + 1; b < runs.size(); ++b) {
      overlap[a][b] = overlap[b][a] = mean(a, b);
    }
  }
  return overlap;
}

double missed_mass_total(const Series& series) {
  double total = 0.0;
  for (const double m : series.all(Metric::missed_mass)) {
    total += std::isnan(m) ? 0.0 : m;
  }
  return total;
}

Index count_events(const EvictionLog& log) {
  const auto event = [](const LogEntry& e) { return std::tuple(e.step, e.layer, e.lane); };
  Index events = 0;
  for (std::size_t i = 0; i < log.entries.size(); ++i) {
    events += i == 0 || event(log.entries[i]) != event(log.entries[i - 1]) ? 1 : 0;
  }
  return events;
}

Index count_moved(const SequenceInfo& info, const EvictionLog& log) {
  // By (layer, lane): evicted positions so far, ascending. Evictions within a prefill come before all others
  // there.
  std::map<std::pair<Index, Index>, std::vector<Index>> gone;
  std::vector<LogEntry> entries = log.entries;
  const auto event = [](const LogEntry& e) { return std::tuple(e.step, e.layer, e.lane, !e.within); };
  std::ranges::stable_sort(entries, {}, event);
  Index moved = 0;
  for (std::size_t i = 0; i < entries.size();) {
    const LogEntry& first = entries[i];  // Its token is the event's lowest: entries ascend by token.
    std::vector<Index>& positions = gone[{first.layer, first.lane}];
    for (; i < entries.size() && event(entries[i]) == event(first); ++i) {
      positions.insert(std::ranges::lower_bound(positions, entries[i].token), entries[i].token);
    }
    const Index joined = info.prompt + first.step;
    const Index gone_above = positions.end() - std::ranges::upper_bound(positions, first.token);
    moved += joined - 1 - first.token - gone_above;
  }
  return moved;
}

Index total_attention_tokens(const RunResult& run) {
  return std::accumulate(run.attention_tokens.begin(), run.attention_tokens.end(), Index{0});
}

std::vector<Index> attention_tokens_by_step(const SequenceInfo& info, const RunResult& run) {
  std::vector<Index> by_step(at(info.steps()), 0);
  for (std::size_t i = 0; i < run.attention_tokens.size(); ++i) {
    by_step[i % by_step.size()] += run.attention_tokens[i];
  }
  return by_step;
}

Tokens count_tokens(const SequenceInfo& info, const RunResult& run) {
  Tokens tokens;
  const auto lanes = static_cast<double>(lanes_of(info, run));
  if (info.steps() > 0) {
    tokens.mean =
        static_cast<double>(total_attention_tokens(run)) / (lanes * static_cast<double>(info.steps()));
    tokens.peak = std::ranges::max(run.attention_tokens);
  }
  tokens.final =
      static_cast<double>(std::accumulate(run.final_tokens.begin(), run.final_tokens.end(), Index{0})) /
      lanes;
  return tokens;
}

std::optional<Index> lane_token_bytes(const SequenceInfo& info, const RunResult& run) {
  if (!info.head_dim || !info.element_bytes) {
    return std::nullopt;
  }
  return 2 * *info.head_dim * *info.element_bytes * kv_heads_of_lane(info, run);
}

std::optional<Bytes> count_bytes(const SequenceInfo& info, const RunResult& run) {
  const std::optional<Index> token_bytes = lane_token_bytes(info, run);
  if (!token_bytes) {
    return std::nullopt;
  }
  const Index unit = *token_bytes;
  Bytes bytes;
  if (info.steps() > 0) {
    bytes.mean = static_cast<double>(total_attention_tokens(run) * unit) / static_cast<double>(info.steps());
    bytes.peak = std::ranges::max(attention_tokens_by_step(info, run)) * unit;
  }
  bytes.final = std::accumulate(run.final_tokens.begin(), run.final_tokens.end(), Index{0}) * unit;
  bytes.prefill = run.prefill_tokens * unit;
  return bytes;
}

bool unequal_bytes(const SequenceInfo& info, const RunResult& first, const RunResult& run) {
  const Index expected = total_attention_tokens(first) * kv_heads_of_lane(info, first);
  const Index found = total_attention_tokens(run) * kv_heads_of_lane(info, run);
  const Index difference = std::abs(found - expected);
  const Index one_token_a_lane = info.layers * info.kv_heads * info.steps();
  return difference * 100 > expected && difference > one_token_a_lane;
}

}  // namespace hae
