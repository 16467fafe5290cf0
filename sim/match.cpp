#include "sim/match.hpp"

#include <algorithm>
#include <optional>

namespace hae {
namespace {

/// A non-negative fraction, compared exactly.
struct Fraction {
  Index numerator;
  Index denominator;
};

/// |a - b| as a fraction; products stay below 2^127 for any trace that fits in memory.
struct Distance {
  WideIndex numerator;
  WideIndex denominator;

  Distance(const Fraction& a, const Fraction& b)
      : numerator(static_cast<WideIndex>(a.numerator) * b.denominator -
                  static_cast<WideIndex>(b.numerator) * a.denominator),
        denominator(static_cast<WideIndex>(a.denominator) * b.denominator) {
    numerator = numerator < 0 ? -numerator : numerator;
  }

  /// Both distances are measured from the same point by the same candidate, so their denominators agree.
  bool operator<(const Distance& other) const {
    HAE_EXPECTS(denominator == other.denominator);
    return numerator < other.numerator;
  }
};

Index lanes_of(const SequenceInfo& info, LaneKind kind) {
  return info.layers * lane_count(info, kind);
}

std::optional<Fraction> candidate_tokens(const SequenceInfo& info, const Policy& policy, Index budget,
                                         const std::vector<Index>& after_prune, MatchTarget target) {
  Index total = 0;
  Index peak = 0;
  for (Index layer = 0; layer < info.layers; ++layer) {
    const std::optional<LaneSizes> sizes = policy.sizes(info, layer, budget, after_prune[at(layer)]);
    if (!sizes) {
      return std::nullopt;
    }
    total += sizes->total * lane_count(info, policy.lanes());
    peak = std::max(peak, sizes->peak);
  }
  if (target == MatchTarget::peak) {
    return Fraction{peak, 1};
  }
  return Fraction{total, lanes_of(info, policy.lanes()) * info.steps()};
}

}  // namespace

std::shared_ptr<const Policy> match_budget(const SequenceInfo& info, const RunResult& first,
                                           const std::shared_ptr<const Policy>& candidate,
                                           const std::vector<Index>& after_prune, MatchTarget target) {
  if (info.steps() == 0) {
    throw ConfigError("--match: sequence '" + info.name +
                      "' has no decode step, so there are no tokens to match; leave --match out");
  }
  const Fraction goal = target == MatchTarget::peak ? Fraction{*count_tokens(info, first).peak, 1}
                                                    : Fraction{total_attention_tokens(first),
                                                               lanes_of(info, first.lanes) * info.steps()};
  std::optional<Index> best;
  std::optional<Distance> best_distance;
  for (Index budget = 1; budget <= info.tokens; ++budget) {
    const std::optional<Fraction> tokens = candidate_tokens(info, *candidate, budget, after_prune, target);
    if (!tokens) {
      continue;
    }
    const Distance distance(*tokens, goal);
    if (!best_distance || distance < *best_distance) {
      best = budget;
      best_distance = distance;
    }
  }
  if (!best) {
    throw ConfigError("--match: no budget from 1 to " + std::to_string(info.tokens) +
                      " is possible for policy '" + candidate->spec() + "' in sequence '" + info.name + "'");
  }
  return candidate->with_budget(*best);
}

std::vector<Index> residents_after_prune(const SequenceInfo& info, const RunResult& run) {
  std::vector<Index> residents(static_cast<std::size_t>(info.layers), info.prompt);
  for (const LogEntry& entry : run.log.entries) {
    if (entry.step == 0 && (entry.lane == kLayerLane || entry.lane == 0)) {
      --residents[static_cast<std::size_t>(entry.layer)];
    }
  }
  return residents;
}

}  // namespace hae
