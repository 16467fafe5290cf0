#include "validate/selection.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "sim/text.hpp"

namespace hae::validate {
namespace {

Finding finding_of(const Problem& problem, Finding::Kind kind, Index lane, Index rank, double expected,
                   double got, const std::string& what) {
  const Index most = problem.extent(Axis::most);
  Finding finding;
  finding.kind = kind;
  finding.array = kind == Finding::Kind::score ? "chosen_scores" : "chosen";
  finding.place = place_of(problem, *problem.output(finding.array), lane * most + rank);
  finding.expected = expected;
  finding.got = got;
  finding.wrong = 1;
  finding.text = finding.array + finding.place + ": " + what;
  return finding;
}

std::string score_text(const Lane& lane, Index slot) {
  return "slot " + std::to_string(slot) + " (score " + shortest(lane.scores[at(slot)]) + ", position " +
         shortest(lane.positions[at(slot)]) + ")";
}

/// Whether rounding may exchange two slots.
bool excused(const Lane& lane, Index a, Index b) {
  const double bound = lane.bounds[at(a)] + lane.bounds[at(b)];
  return bound > 0 && std::fabs(lane.scores[at(a)] - lane.scores[at(b)]) <= bound;
}

/// A list that is no list of distinct eligible slots of the right length.
std::optional<Finding> malformed(const Problem& problem, const Lane& lane, Index index,
                                 const std::vector<Index>& right, const double* chosen) {
  std::set<double> seen;
  for (Index rank = 0; rank < problem.extent(Axis::most); ++rank) {
    const double slot = chosen[rank];
    const bool expects_none = rank >= std::ssize(right);
    if (expects_none || slot == -1) {
      if (expects_none != (slot == -1)) {
        const double expected = expects_none ? -1 : double(right[at(rank)]);
        return finding_of(problem, Finding::Kind::choice, index, rank, expected, slot,
                          "expected " + shortest(expected) + ", got " + shortest(slot) + ": " +
                              std::to_string(right.size()) + " slots can be chosen");
      }
      continue;
    }
    const auto slots = double(std::ssize(lane.scores));
    const bool inside = slot >= 0 && slot < slots;
    if (!inside || !lane.eligible[at(Index(slot))] || !seen.insert(slot).second) {
      return finding_of(
          problem, Finding::Kind::choice, index, rank, double(right[at(rank)]), slot,
          "got slot " + shortest(slot) +
              (!inside                           ? ", which is outside the lane"
               : !lane.eligible[at(Index(slot))] ? ", which is not eligible or beyond the length"
                                                 : ", which was chosen before") +
              "; expected " + score_text(lane, right[at(rank)]));
    }
  }
  return std::nullopt;
}

/// A chosen slot that should have stayed while another should have gone, and no rounding excuses it.
std::optional<Finding> wrong_set(const Problem& problem, const Lane& lane, Index index,
                                 const std::vector<Index>& right, const std::vector<Index>& chosen) {
  const std::set<Index> should(right.begin(), right.end());
  const std::set<Index> did(chosen.begin(), chosen.end());
  for (Index rank = 0; rank < std::ssize(chosen); ++rank) {
    if (should.contains(chosen[at(rank)])) {
      continue;
    }
    for (const Index missed : right) {
      if (!did.contains(missed) && !excused(lane, chosen[at(rank)], missed)) {
        return finding_of(
            problem, Finding::Kind::choice, index, rank, double(missed), double(chosen[at(rank)]),
            "chose " + score_text(lane, chosen[at(rank)]) + " and left " + score_text(lane, missed));
      }
    }
  }
  return std::nullopt;
}

std::optional<Finding> wrong_order(const Problem& problem, const Lane& lane, Index index,
                                   const std::vector<Index>& chosen) {
  for (Index rank = 1; rank < std::ssize(chosen); ++rank) {
    const Index first = chosen[at(rank - 1)];
    const Index second = chosen[at(rank)];
    if (goes_before(lane, second, first) && !excused(lane, first, second)) {
      return finding_of(problem, Finding::Kind::order, index, rank - 1, double(second), double(first),
                        score_text(lane, first) + " stands before " + score_text(lane, second));
    }
  }
  return std::nullopt;
}

std::optional<Finding> wrong_score(const Problem& problem, const Lane& lane, Index index,
                                   const std::vector<Index>& chosen, const double* scores) {
  for (Index rank = 0; rank < std::ssize(chosen); ++rank) {
    const double expected = lane.scores[at(chosen[at(rank)])];
    const double bound = lane.bounds[at(chosen[at(rank)])];
    const bool same = expected == scores[rank] || (std::isnan(expected) && std::isnan(scores[rank]));
    if (!same && !(std::fabs(scores[rank] - expected) <= bound)) {
      Finding finding = finding_of(problem, Finding::Kind::score, index, rank, expected, scores[rank],
                                   "expected " + shortest(expected) + ", the score of slot " +
                                       std::to_string(chosen[at(rank)]) + ", got " + shortest(scores[rank]));
      finding.bound = bound;
      return finding;
    }
  }
  return std::nullopt;
}

}  // namespace

bool goes_before(const Lane& lane, Index a, Index b) {
  const double x = lane.scores[at(a)];
  const double y = lane.scores[at(b)];
  if (std::isnan(x) != std::isnan(y)) {
    return std::isnan(x);
  }
  return x != y && !std::isnan(x) ? x < y : lane.positions[at(a)] < lane.positions[at(b)];
}

std::vector<Index> lowest(const Lane& lane) {
  std::vector<Index> order;
  for (Index slot = 0; slot < std::ssize(lane.scores); ++slot) {
    if (lane.eligible[at(slot)]) {
      order.push_back(slot);
    }
  }
  std::ranges::sort(order, [&](Index a, Index b) { return goes_before(lane, a, b); });
  order.resize(std::min(order.size(), at(lane.count)));
  return order;
}

std::vector<Suspicion> choice_suspicions(std::vector<Lane> (*lanes_of)(const Problem&)) {
  const auto all_are = [](Finding::Kind kind) {
    return [kind](const Problem&, const Results&, const std::vector<Finding>& findings) {
      return std::ranges::all_of(findings, [&](const Finding& finding) { return finding.kind == kind; });
    };
  };
  const auto is_outside = [](const Problem& problem, const Results& results, const std::vector<Finding>&) {
    return std::ranges::any_of(results.at("chosen"), [&](double slot) {
      return slot < -1 || slot >= double(problem.extent(Axis::slots));
    });
  };
  /// Each choice is the right one modulo a block: its offset was lost.
  const auto lost_offset = [lanes_of](Index block) {
    return [lanes_of, block](const Problem& problem, const Results& results,
                             const std::vector<Finding>& findings) {
      if (findings.front().kind != Finding::Kind::choice) {
        return false;
      }
      const std::vector<Lane> lanes = lanes_of(problem);
      const Index most = problem.extent(Axis::most);
      bool differs = false;
      for (Index l = 0; l < std::ssize(lanes); ++l) {
        const std::vector<Index> right = lowest(lanes[at(l)]);
        for (Index rank = 0; rank < std::ssize(right); ++rank) {
          if (results.at("chosen")[at(l * most + rank)] != double(right[at(rank)] % block)) {
            return false;
          }
          differs = differs || right[at(rank)] >= block;
        }
      }
      return differs;
    };
  };
  /// Every rank has the score it should have, and only tokens of equal scores stand for each other.
  const auto is_right_but_for_ties = [lanes_of](const Problem& problem, const Results& results,
                                                const std::vector<Finding>& findings) {
    if (findings.front().kind != Finding::Kind::choice && findings.front().kind != Finding::Kind::order) {
      return false;
    }
    const std::vector<Lane> lanes = lanes_of(problem);
    const Index most = problem.extent(Axis::most);
    for (Index l = 0; l < std::ssize(lanes); ++l) {
      const std::vector<double>& scores = lanes[at(l)].scores;
      const std::vector<Index> right = lowest(lanes[at(l)]);
      for (Index rank = 0; rank < std::ssize(right); ++rank) {
        const double slot = results.at("chosen")[at(l * most + rank)];
        if (!(slot >= 0 && slot < double(scores.size()))) {
          return false;
        }
        const double score = scores[at(Index(slot))];
        const double expected = scores[at(right[at(rank)])];
        if (score != expected && !(std::isnan(score) && std::isnan(expected))) {
          return false;
        }
      }
    }
    return true;
  };
  std::vector<Suspicion> all{
      {"one token fewer is chosen than asked for",
       [](const Problem& p) {
         return with_values(p, "counts", [](double n) { return std::max(n - 1, 0.0); });
       }},
      {"equal scores are in no fixed order, as a top-k leaves them: rank them by position too",
       {},
       is_right_but_for_ties},
      {"the right set in a wrong order", {}, all_are(Finding::Kind::order)},
      {"the scores beside the choice are not those of the chosen", {}, all_are(Finding::Kind::score)},
      {"an index outside the lane is returned, as for a NaN that never wins a comparison", {}, is_outside},
  };
  for (const Index block : {16, 32, 64, 128, 256, 512, 1024}) {
    all.push_back(
        {"slots are numbered within blocks of " + std::to_string(block) + ": the block's offset is lost",
         {},
         lost_offset(block)});
  }
  return all;
}

void judge_choices(const Problem& problem, const std::vector<Lane>& lanes, const std::vector<double>& chosen,
                   const std::vector<double>* chosen_scores, bool ordered, std::vector<Finding>& findings) {
  const Index most = problem.extent(Axis::most);
  for (Index index = 0; index < std::ssize(lanes); ++index) {
    const Lane& lane = lanes[at(index)];
    const std::vector<Index> right = lowest(lane);
    const double* list = chosen.data() + index * most;
    std::optional<Finding> found = malformed(problem, lane, index, right, list);
    if (!found) {
      const std::vector<Index> slots(list, list + std::ssize(right));
      found = wrong_set(problem, lane, index, right, slots);
      if (!found && ordered) {
        found = wrong_order(problem, lane, index, slots);
      }
      if (!found && chosen_scores != nullptr) {
        found = wrong_score(problem, lane, index, slots, chosen_scores->data() + index * most);
      }
    }
    if (found) {
      findings.push_back(std::move(*found));  // one lane says enough
      return;
    }
  }
}

}  // namespace hae::validate
