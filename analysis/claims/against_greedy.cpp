#include "analysis/claims/against_greedy.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace hae::analysis {
namespace {

/// A token in a lane, and a lane at a step.
using LaneToken = std::tuple<Index, Index, Index>;  // layer, lane, token
using LaneStep = std::tuple<Index, Index, Index>;   // layer, lane, step
using Event = std::pair<LaneStep, Index>;           // and the token

/// A log by token: each leaves a lane once.
using Entries = std::map<LaneToken, const LogEntry*>;

Entries entries_of(const RunResult& run) {
  Entries entries;
  for (const LogEntry& entry : run.log.entries) {
    entries.emplace(LaneToken{entry.layer, entry.lane, entry.token}, &entry);
  }
  return entries;
}

std::set<Event> marks_of(const RunResult& run) {
  std::set<Event> marks;
  for (const LogEntry& entry : run.log.entries) {
    if (entry.pending_since) {
      marks.insert({{entry.layer, entry.lane, *entry.pending_since}, entry.token});
    }
  }
  for (const PendingEntry& entry : run.log.pending) {
    marks.insert({{entry.layer, entry.lane, entry.since}, entry.token});
  }
  return marks;
}

std::set<Event> decode_evictions_of(const RunResult& run) {
  std::set<Event> evictions;
  for (const LogEntry& entry : run.log.entries) {
    if (entry.step > 0) {
      evictions.insert({{entry.layer, entry.lane, entry.step}, entry.token});
    }
  }
  return evictions;
}

std::set<std::pair<LaneToken, bool>> prefill_evictions_of(const RunResult& run) {
  std::set<std::pair<LaneToken, bool>> evictions;
  for (const LogEntry& entry : run.log.entries) {
    if (entry.step == 0) {
      evictions.insert({{entry.layer, entry.lane, entry.token}, entry.within});
    }
  }
  return evictions;
}

// Assumptions. Each returns the first that is not met, or nothing.

/// Budget of greedy less that of the bin, as a claim wants it.
enum class Budgets { equal, plus_bin_less_one, plus_bin };

Index budget_of_greedy(const Limits& bin, Budgets budgets) {
  const Index more = budgets == Budgets::equal ? 0 : budgets == Budgets::plus_bin ? *bin.bin : *bin.bin - 1;
  return *bin.budget + more;
}

std::string unmet_by_limits(const Duel& duel, Budgets budgets) {
  if (duel.bin.lanes != duel.greedy.lanes || duel.bin.limits.size() != duel.greedy.limits.size()) {
    return "the runs evict from different lanes";
  }
  for (std::size_t lane = 0; lane < duel.bin.limits.size(); ++lane) {
    const Limits& bin = duel.bin.limits[lane];
    const Limits& greedy = duel.greedy.limits[lane];
    if (!bin.budget || !bin.bin || !greedy.budget || greedy.bin) {
      return "the runs are not one with a recycle bin and one of greedy eviction";
    }
    if (bin.sinks != greedy.sinks || bin.recent != greedy.recent) {
      return "the runs protect different tokens";
    }
    if (*greedy.budget != budget_of_greedy(bin, budgets)) {
      return "greedy's budget is " + std::to_string(*greedy.budget) + ", not " +
             std::to_string(budget_of_greedy(bin, budgets));
    }
  }
  return "";
}

/// The runs differ in nothing but the bin.
std::string unmet_by_pair(const Duel& duel, Budgets budgets) {
  if (duel.info.steps() == 0) {
    return "the sequence has no decode step";
  }
  if (std::string unmet = unmet_by_limits(duel, budgets); !unmet.empty()) {
    return unmet;
  }
  if (std::ranges::any_of(duel.bin.log.entries,
                          [](const LogEntry& e) { return e.step > 0 && !e.pending_since; })) {
    return "the bin is not filled by marking";
  }
  if (prefill_evictions_of(duel.bin) != prefill_evictions_of(duel.greedy)) {
    return "the runs evict different tokens in the prefill";
  }
  return "";
}

std::string unmet_by_eviction_free_scores(const Duel& duel, Budgets budgets) {
  const std::string unmet = unmet_by_pair(duel, budgets);
  return unmet.empty() && !duel.scores.full && !duel.scores.fixed ? "scores depend on evictions" : unmet;
}

std::string unmet_by_fixed_scores(const Duel& duel, Budgets budgets) {
  if (std::string unmet = unmet_by_pair(duel, budgets); !unmet.empty()) {
    return unmet;
  }
  if (!duel.scores.fixed) {
    return "scores change with time";
  }
  for (const Limits& bin : duel.bin.limits) {
    if (bin.sinks != 0 || bin.recent != 0) {
      return "some tokens are protected";
    }
    if (duel.info.prompt > *bin.budget) {
      return "the prompt exceeds the budget";
    }
  }
  return "";
}

std::string unmet_by_growing_attention(const Duel& duel, Budgets budgets) {
  const std::string unmet = unmet_by_fixed_scores(duel, budgets);
  return unmet.empty() && !duel.scores.attention_grows_with_score ? "attention does not grow with the score"
                                                                  : unmet;
}

// What is measured.

/// Whether a set of evicted tokens contains another at every row, which makes sums over them comparable
/// exactly.
enum class Sets { nested, any };

/// The largest difference of missed mass over the decode rows that have mass, `more` less `less`.
Finding largest_difference(const Duel& duel, const RunResult& more, const RunResult& less, Sets sets,
                           std::string unmet) {
  const std::span<const double> left = more.decode.all(Metric::missed_mass);
  const std::span<const double> right = less.decode.all(Metric::missed_mass);
  HAE_EXPECTS(left.size() == right.size());
  Finding finding;
  finding.unmet = std::move(unmet);
  double largest = -std::numeric_limits<double>::infinity();
  for (std::size_t row = 0; row < left.size(); ++row) {
    if (!std::isnan(left[row])) {  // masked rows are masked in every run
      largest = std::max(largest, left[row] - right[row]);
      ++finding.cases;
    }
  }
  finding.measured = finding.cases == 0 ? 0.0 : largest;
  // Four canonical sums: two in each of two quotients, which are at most 1.
  finding.rounding = sets == Sets::nested ? 0.0 : 4.0 * canonical_rounding_of(duel.info.tokens);
  return finding;
}

/// (layer, lane, step, token) that `keeper` keeps after a step and `other` does not.
Finding kept_by_one_only(const Duel& duel, const RunResult& keeper, const RunResult& other,
                         std::string unmet) {
  const Entries keeper_entries = entries_of(keeper);
  Finding finding;
  finding.unmet = std::move(unmet);
  Index violations = 0;
  for (const LogEntry& entry : other.log.entries) {
    const auto found = keeper_entries.find({entry.layer, entry.lane, entry.token});
    const Index kept_until = found == keeper_entries.end() ? duel.info.steps() + 1 : found->second->step;
    violations += std::max<Index>(0, kept_until - entry.step);
    ++finding.cases;
  }
  finding.measured = static_cast<double>(violations);
  return finding;
}

}  // namespace

Finding marks_are_greedys_evictions(const Duel& duel) {
  const std::set<Event> marks = marks_of(duel.bin);
  const std::set<Event> evictions = decode_evictions_of(duel.greedy);
  std::vector<Event> differing;
  std::ranges::set_symmetric_difference(marks, evictions, std::back_inserter(differing));
  std::set<LaneStep> moments;
  for (const auto& [moment, token] : differing) {
    moments.insert(moment);
  }
  Finding finding;
  finding.unmet = unmet_by_eviction_free_scores(duel, Budgets::equal);
  finding.measured = static_cast<double>(moments.size());
  finding.cases = duel.info.layers * lane_count(duel.info, duel.bin.lanes) * duel.info.steps();
  return finding;
}

Finding evicted_is_subset(const Duel& duel) {
  const Entries greedy = entries_of(duel.greedy);
  Finding finding;
  finding.unmet = unmet_by_eviction_free_scores(duel, Budgets::equal);
  for (const LogEntry& entry : duel.bin.log.entries) {
    const auto found = greedy.find({entry.layer, entry.lane, entry.token});
    finding.measured += found == greedy.end() || found->second->step > entry.step ? 1.0 : 0.0;
    ++finding.cases;
  }
  return finding;
}

Finding missed_mass_is_less(const Duel& duel) {
  return largest_difference(duel, duel.bin, duel.greedy, Sets::nested,
                            unmet_by_eviction_free_scores(duel, Budgets::equal));
}

Gain mass_in_bin(const Duel& duel) {
  const std::span<const double> bin = duel.bin.decode.all(Metric::missed_mass);
  const std::span<const double> greedy = duel.greedy.decode.all(Metric::missed_mass);
  HAE_EXPECTS(bin.size() == greedy.size());
  Gain gain;
  for (std::size_t row = 0; row < bin.size(); ++row) {
    if (!std::isnan(bin[row])) {
      gain.total += greedy[row] - bin[row];
      gain.largest = std::max(gain.largest, greedy[row] - bin[row]);
    }
  }
  return gain;
}

Finding printed_corollary(const Duel& duel) {
  const Entries greedy = entries_of(duel.greedy);
  Finding finding;
  finding.unmet = unmet_by_pair(duel, Budgets::equal);
  for (const LogEntry& entry : duel.bin.log.entries) {
    const auto found = greedy.find({entry.layer, entry.lane, entry.token});
    if (entry.step > 0 && entry.score && found != greedy.end() && found->second->score) {
      finding.measured += *entry.score;
      finding.bound += *found->second->score;
      ++finding.cases;
    }
  }
  if (finding.applies() && finding.cases == 0) {
    finding.unmet = "no token is evicted by both";
  }
  finding.rounding = rounding_of(2 * finding.cases) * std::max(finding.measured, finding.bound);
  return finding;
}

Finding reversed_corollary(const Duel& duel) {
  const Entries greedy = entries_of(duel.greedy);
  Finding finding;
  finding.unmet = unmet_by_eviction_free_scores(duel, Budgets::equal);
  if (finding.applies() && !duel.scores.sums) {
    finding.unmet = "scores may fall";
  }
  double largest = -std::numeric_limits<double>::infinity();
  for (const LogEntry& entry : duel.bin.log.entries) {
    const auto found = greedy.find({entry.layer, entry.lane, entry.token});
    if (entry.step > 0 && entry.score && found != greedy.end() && found->second->score) {
      largest = std::max(largest, *found->second->score - *entry.score);
      ++finding.cases;
    }
  }
  finding.measured = finding.cases == 0 ? 0.0 : largest;
  return finding;
}

Finding kept_is_superset(const Duel& duel) {
  return kept_by_one_only(duel, duel.greedy, duel.bin, unmet_by_eviction_free_scores(duel, Budgets::equal));
}

Finding not_worse_at_equal_budget(const Duel& duel) {
  return missed_mass_is_less(duel);
}

Finding kept_is_subset_of_larger(const Duel& duel) {
  return kept_by_one_only(duel, duel.bin, duel.greedy, unmet_by_fixed_scores(duel, Budgets::plus_bin));
}

Finding greedy_not_worse_at_equal_peak(const Duel& duel) {
  return largest_difference(duel, duel.greedy, duel.bin, Sets::any,
                            unmet_by_growing_attention(duel, Budgets::plus_bin_less_one));
}

Finding greedy_not_worse_with_changing_scores(const Duel& duel) {
  return largest_difference(duel, duel.greedy, duel.bin, Sets::any,
                            unmet_by_eviction_free_scores(duel, Budgets::plus_bin_less_one));
}

Finding mass_is_between(const Duel& at_budget, const Duel& at_peak) {
  HAE_EXPECTS(&at_budget.bin == &at_peak.bin);
  const Finding less_than_bin = largest_difference(at_budget, at_budget.bin, at_budget.greedy, Sets::nested,
                                                   unmet_by_growing_attention(at_budget, Budgets::equal));
  return worse(less_than_bin, greedy_not_worse_at_equal_peak(at_peak));
}

}  // namespace hae::analysis
