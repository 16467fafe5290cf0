#include "sim/cli/evidence.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "analysis/claims/against_greedy.hpp"
#include "analysis/claims/pruning_loss.hpp"
#include "analysis/row_identities.hpp"

namespace hae::cli {
namespace {

using analysis::Duel;
using analysis::Finding;

void note(Findings& findings, std::string_view id, const Finding& finding) {
  const auto [place, is_new] = findings.emplace(id, finding);
  if (!is_new) {
    place->second = analysis::worse(place->second, finding);
  }
}

/// The pruning's layers against its thresholds.
std::optional<PruningLoss> judge_pruning(Sequence& sequence, const Pruning& pruning, const RunResult& run,
                                         double epsilon, const ReplayOptions& options,
                                         const std::string& where, Findings& findings) {
  std::optional<PruningLoss> most;
  for (const analysis::DecidingLayer& layer :
       analysis::deciding_layers(sequence, run.log, pruning.view(), options, where)) {
    if (layer.candidates.empty()) {
      continue;
    }
    if (!pruning.is_by_mass()) {
      const analysis::PruningThresholds thresholds{pruning.options.r, *pruning.options.alpha};
      const Index pruned = std::max<Index>(1, layer.evicted_count());
      note(findings, "DAP.columns", analysis::pruned_columns(layer, thresholds));
      note(findings, "DAP.rows", analysis::pruned_rows(layer, thresholds));
      note(findings, "DAP.share", analysis::pruned_share(layer, thresholds, epsilon, pruned));
    } else {
      note(findings, "MASS.guarantee", analysis::mass_guarantee(layer, pruning.options.eps));
      if (pruning.is_mass_alone()) {
        note(findings, "MASS.optimal", analysis::mass_optimal(layer, pruning.options.eps, pruning.sinks));
      }
    }
    const double total = layer.total();
    const double share = total > 0.0 ? layer.evicted_sum() / total : 0.0;
    if (!most || share > most->share) {
      most = PruningLoss{share, layer.evicted_count(), std::ssize(layer.candidates)};
    }
  }
  return most;
}

/// The one budget and bin of all lanes; none where they differ, or a lane has no bin.
std::optional<std::pair<Index, Index>> common_budget_and_bin(const RunResult& run) {
  const Limits& first = run.limits.front();
  const bool agree = std::ranges::all_of(
      run.limits, [&](const Limits& l) { return l.budget == first.budget && l.bin == first.bin; });
  return agree && first.budget && first.bin ? std::optional(std::pair(*first.budget, *first.bin))
                                            : std::nullopt;
}

/// The claims about the recycle bin and greedy eviction, with full scores.
void judge_bin(Sequence& sequence, const BinAgainstGreedy& pair, const RunResult& bin,
               const RunResult& greedy, const ReplayOptions& options, const std::string& where,
               Findings& findings) {
  const analysis::ScoreAssumptions scores{.full = true, .sums = pair.sums};
  const Duel duel{sequence.info(), bin, greedy, scores};
  note(findings, "C2.1", analysis::printed_corollary(duel));
  note(findings, "G1.marks", analysis::marks_are_greedys_evictions(duel));
  note(findings, "G1.subset", analysis::evicted_is_subset(duel));
  note(findings, "G1.mass", analysis::missed_mass_is_less(duel));
  note(findings, "G2.subset", analysis::kept_is_superset(duel));
  note(findings, "G3.budget", analysis::not_worse_at_equal_budget(duel));
  const auto limits = common_budget_and_bin(bin);
  if (!limits) {
    return;
  }
  const auto& [budget, capacity] = *limits;
  const std::vector<RunResult> larger =
      replay(sequence, {pair.greedy_with(budget + capacity - 1), pair.greedy_with(budget + capacity)},
             options, where);
  const Duel at_peak{sequence.info(), bin, larger[0], scores};
  note(findings, "G2.converse",
       analysis::kept_is_subset_of_larger({sequence.info(), bin, larger[1], scores}));
  note(findings, "G2.mass", analysis::mass_is_between(duel, at_peak));
  note(findings, "G3.peak", analysis::greedy_not_worse_at_equal_peak(at_peak));
  note(findings, "G3.changing", analysis::greedy_not_worse_with_changing_scores(at_peak));
}

/// What the evicted tokens would have received, and the identities of single rows.
void walk(Sequence& sequence, const RunResult& run, const ReplayOptions& options, const std::string& where,
          Evidence& evidence) {
  analysis::ForegoneAttentionVisitor foregone(sequence.info(), run.lanes);
  analysis::RowIdentitiesVisitor identities(sequence.info());
  analysis::walk_decode(sequence, run, options, where,
                        std::array<analysis::DecodeVisitor*, 2>{&foregone, &identities});
  evidence.foregone = foregone.take();
  const analysis::RowFindings rows = identities.take();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    note(evidence.findings, analysis::kRowClaims[i], rows[i]);
  }
}

}  // namespace

void add(Findings& worst, const Findings& other) {
  for (const auto& [id, finding] : other) {
    note(worst, id, finding);
  }
}

Evidence gather_evidence(const SequenceSource& source, const Certified& certified, double epsilon,
                         const ReplayOptions& options) {
  const std::string where = source.trace->name();
  const std::unique_ptr<Sequence> sequence = source.trace->open(source.index_in_trace);
  const std::shared_ptr<const Policy> policy = certified.policy.of(sequence->info(), source.trace_sha256);
  if (policy->merges()) {
    throw ConfigError("policy '" + policy->spec() +
                      "' merges tokens, so that no mass is missed and no claim is about it; certify another");
  }
  std::vector<std::shared_ptr<const Policy>> policies{policy};
  if (certified.pruning) {
    policies.push_back(certified.pruning->policy);
  }
  const std::size_t pair = policies.size();
  if (certified.pair) {
    policies.insert(policies.end(), {certified.pair->bin, certified.pair->greedy});
    if (certified.pair->own_greedy) {
      policies.push_back(certified.pair->own_greedy);
    }
  }
  const std::vector<RunResult> runs = replay(*sequence, policies, options, where);

  Evidence evidence{.sequence_index = source.sequence_index,
                    .name = sequence->info().name,
                    .group = sequence->info().group};
  const std::optional<Summary> missed = summarise(runs.front().decode.all(Metric::missed_mass));
  evidence.loss = missed ? std::optional(missed->mean) : std::nullopt;
  for (const Limits& limits : runs.front().limits) {
    evidence.largest_bin = std::max(evidence.largest_bin, limits.bin.value_or(0));
  }
  if (certified.pruning) {
    evidence.pruning =
        judge_pruning(*sequence, *certified.pruning, runs[1], epsilon, options, where, evidence.findings);
  }
  if (certified.pair) {
    judge_bin(*sequence, *certified.pair, runs[pair], runs[pair + 1], options, where, evidence.findings);
    if (certified.pair->own_greedy) {
      evidence.observed = analysis::missed_mass_is_less(
          {sequence->info(), runs.front(), runs[pair + 2], {.full = false, .sums = certified.pair->sums}});
    }
  }
  walk(*sequence, runs.front(), options, where, evidence);
  return evidence;
}

}  // namespace hae::cli
