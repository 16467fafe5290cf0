#include "analysis/claims/against_greedy.hpp"

#include <gtest/gtest.h>
// RapidCheck needs GoogleTest first.
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "testing/generators.hpp"
#include "testing/memory_trace.hpp"
#include "tests/analysis/claims/fixed_scores.hpp"
#include "tests/support/interesting.hpp"
#include "tests/support/policy_specs.hpp"

// DDES against greedy: the real policies on every small trace and on generated ones, the model of fixed
// scores on every small sequence, and a pinned counterexample for what is refuted and for each assumption.

namespace hae::analysis {
namespace {

using testing::attention_trace;
using testing::check_interesting;
using testing::FixedScores;
using testing::MemoryTrace;

using Rows = std::vector<std::vector<float>>;

MemoryTrace text_trace(const Rows& rows, Index prompt = 1) {
  return attention_trace({rows}, prompt, std::vector<Index>(rows.size(), -1));
}

/// Two runs and what is said about them.
struct Contest {
  MemoryTrace trace;
  std::vector<RunResult> runs;
  ScoreAssumptions scores;

  Contest(MemoryTrace of, const std::string& bin, const std::string& greedy, ScoreAssumptions assumed)
      : trace(std::move(of)),
        runs(testing::run_all(trace, {"hae:" + bin, "greedy:" + greedy})),
        scores(assumed) {}

  [[nodiscard]] Duel duel() const { return {trace.info, runs[0], runs[1], scores}; }
  [[nodiscard]] double missed(std::size_t run) const { return missed_mass_total(runs[run].decode); }
};

constexpr ScoreAssumptions kFull{.full = true};
constexpr ScoreAssumptions kObserved{};
constexpr ScoreAssumptions kFixed{.full = true, .fixed = true, .attention_grows_with_score = true};

/// `budget=l,bin=D` and greedy's budget, with the options both share.
struct Setting {
  Index budget = 1;
  Index bin = 2;
  Index greedy_budget = 1;
  Index recent = 0;
  std::string scores = "full";
};

Contest contest(MemoryTrace trace, const Setting& s, ScoreAssumptions assumed) {
  const std::string shared = "dap=none,recent=" + std::to_string(s.recent) + ",scores=" + s.scores;
  return {std::move(trace), shared + ",budget=" + std::to_string(s.budget) + ",bin=" + std::to_string(s.bin),
          shared + ",budget=" + std::to_string(s.greedy_budget), assumed};
}

// ---- G1 ---------------------------------------------------------------------------------------------------

/// Calls check(trace) for every trace of T tokens, one in the prompt, whose rows are made of two halves.
template <typename Check>
void for_each_trace_of_halves(Index tokens, const Check& check, Rows rows = {}) {
  const auto row = static_cast<Index>(rows.size());
  if (row == tokens) {
    check(text_trace(rows));
    return;
  }
  for (Index first = 0; first <= row; ++first) {
    for (Index second = first; second <= row; ++second) {
      std::vector<float> next(at(row + 1), 0.0f);
      next[at(first)] += 0.5f;
      next[at(second)] += 0.5f;
      rows.push_back(next);
      for_each_trace_of_halves(tokens, check, rows);
      rows.pop_back();
    }
  }
}

// 1 · 3 · 6 · 10 · 15 = 2,700 traces of 5 tokens, with every budget and bin that matter.
TEST(AgainstGreedy, HoldsOnEverySmallTrace) {
  Index gains = 0;
  Index printed_fails = 0;
  for (Index tokens = 2; tokens <= 5; ++tokens) {
    for_each_trace_of_halves(tokens, [&](const MemoryTrace& trace) {
      for (const Index budget : {1, 2}) {
        for (const Index bin : {1, 2, 3}) {
          const Contest c = contest(trace, {budget, bin, budget, budget - 1}, kFull);
          ASSERT_TRUE(marks_are_greedys_evictions(c.duel()).holds());
          ASSERT_TRUE(evicted_is_subset(c.duel()).holds());
          ASSERT_TRUE(missed_mass_is_less(c.duel()).holds());
          ASSERT_TRUE(reversed_corollary(c.duel()).holds());
          gains += mass_in_bin(c.duel()).total > 0.0 ? 1 : 0;
          printed_fails += printed_corollary(c.duel()).verdict() == Verdict::fails ? 1 : 0;
        }
      }
    });
  }
  EXPECT_GT(gains, 1000);
  EXPECT_GT(printed_fails, 100);
}

/// Options of eviction that both runs share.
std::string draw_shared(const SequenceInfo& info) {
  const std::string lane = *rc::gen::element<std::string>("layer", "kv_head");
  const std::string dap = *rc::gen::element<std::string>("none", "threshold,r=0.3,alpha=0.5", "mass,eps=0.2",
                                                         "threshold,r=0.3,alpha=0.5,broadcast=none",
                                                         "threshold,r=0.3,alpha=0.5,effect=after");
  return "dap=" + dap +
         ",scores=full,budget=" + std::to_string(2 + *rc::gen::inRange<Index>(0, info.tokens)) +
         ",sinks=" + std::to_string(*rc::gen::inRange(0, 2)) +
         ",recent=" + std::to_string(*rc::gen::inRange(0, 2)) + ",lane=" + lane +
         ",group=" + (lane == "layer" ? "mean" : *rc::gen::element<std::string>("mean", "max", "sum"));
}

/// Σ over decode rows of the attention that tokens in the bin receive: evicted by greedy, still kept by DDES.
double mass_of_pending(const Contest& c) {
  const SequenceInfo& info = c.trace.info;
  double total = 0.0;
  for (Index layer = 0; layer < info.layers; ++layer) {
    for (Index head = 0; head < info.query_heads; ++head) {
      const Index lane = c.runs[0].lanes == LaneKind::layer ? 0 : head / info.group_heads();
      const auto bin = testing::residents(c.trace, c.runs[0], layer, lane);
      const auto greedy = testing::residents(c.trace, c.runs[1], layer, lane);
      for (Index step = 1; step <= info.steps(); ++step) {
        const Index query = info.prompt + step - 1;
        const float* w = c.trace.attention[at(layer)].data() + (head * info.tokens + query) * info.tokens;
        const double all = std::accumulate(w, w + query + 1, 0.0);
        std::vector<Index> pending;
        std::ranges::set_difference(bin[at(step - 1)], greedy[at(step - 1)], std::back_inserter(pending));
        for (const Index token : pending) {
          total += all == 0.0 ? 0.0 : static_cast<double>(w[token]) / all;
        }
      }
    }
  }
  return total;
}

TEST(AgainstGreedy, MarksAreGreedysEvictionsAndTheGainIsTheMassInTheBin) {
  check_interesting("G1 on generated traces", 0.3, [] {
    const MemoryTrace trace = *testing::attention_traces();
    const SequenceInfo& info = trace.info;
    const std::string shared = draw_shared(info);
    const Contest c(trace, shared + ",bin=" + std::to_string(*rc::gen::inRange(1, 6)), shared, kFull);
    if (info.steps() == 0) {
      RC_ASSERT(marks_are_greedys_evictions(c.duel()).unmet == "the sequence has no decode step");
      return false;
    }
    RC_ASSERT(marks_are_greedys_evictions(c.duel()).holds());
    RC_ASSERT(evicted_is_subset(c.duel()).holds());
    RC_ASSERT(missed_mass_is_less(c.duel()).holds());
    RC_ASSERT(reversed_corollary(c.duel()).holds());
    const double rows = static_cast<double>(info.layers * info.query_heads * info.steps());
    const double gain = mass_in_bin(c.duel()).total;
    RC_ASSERT(std::abs(gain - mass_of_pending(c)) <= rows * 4.0 * canonical_rounding_of(info.tokens));
    return gain > 0.01 && !c.runs[0].log.entries.empty();
  });
}

// Observed scores change with what was evicted. Rows (1), (0, 1), (1/2, 0, 1/2), l = 1, D = 2. Step 1: scores
// 1 and 1, the older goes: token 0. Step 2: DDES still has 0 in its bin, so 2 gets 1/2 and has the lowest
// score, 1/2 against 1; for greedy 0 is gone, 2 gets all of the row, and of 1 and 1 the older goes: token 1.
TEST(AgainstGreedy, MarksOtherTokensUnderObservedScores) {
  const Rows rows{{1.0f}, {0.0f, 1.0f}, {0.5f, 0.0f, 0.5f}};
  const Contest c = contest(text_trace(rows), {.scores = "observed"}, kObserved);
  const Finding marks = marks_are_greedys_evictions(c.duel());
  EXPECT_EQ(marks.measured, 1.0);
  EXPECT_EQ(marks.unmet, "scores depend on evictions");
  EXPECT_EQ(evicted_is_subset(c.duel()).measured, 1.0);  // of DDES's 0 and 2, greedy kept 2
}

// One row more, (0, 0, 1, 0): DDES has evicted 0 and 2 and misses all of it; greedy has evicted 0 and 1 and
// misses nothing, after 1/2 in step 2. At equal budget DDES loses, in that row and in total.
TEST(AgainstGreedy, CanLoseAtEqualBudgetUnderObservedScores) {
  const Rows rows{{1.0f}, {0.0f, 1.0f}, {0.5f, 0.0f, 0.5f}, {0.0f, 0.0f, 1.0f, 0.0f}};
  const Contest c = contest(text_trace(rows), {.scores = "observed"}, kObserved);
  EXPECT_EQ(missed_mass_is_less(c.duel()).measured, 1.0);
  EXPECT_EQ(not_worse_at_equal_budget(c.duel()).verdict(), Verdict::does_not_apply);
  EXPECT_EQ(c.missed(0), 1.0);
  EXPECT_EQ(c.missed(1), 0.5);
}

// At equal peak greedy loses: l = 1, D = 2, the newest protected, greedy with budget 2. DDES marks 0 and 1,
// and misses 1/2 in step 3 and 1/2 in step 4. Greedy keeps 0, which scored 3, and evicts 1 and 2: 1/2, then
// all.
TEST(AgainstGreedy, GreedyCanLoseAtEqualPeakUnderObservedScores) {
  const Rows rows{
      {1.0f}, {1.0f, 0.0f}, {1.0f, 0.0f, 0.0f}, {0.0f, 0.5f, 0.0f, 0.5f}, {0.0f, 0.5f, 0.5f, 0.0f, 0.0f}};
  const Contest c = contest(text_trace(rows), {1, 2, 2, 1, "observed"}, kObserved);
  const Finding finding = greedy_not_worse_at_equal_peak(c.duel());
  EXPECT_EQ(finding.verdict(), Verdict::does_not_apply);
  EXPECT_EQ(finding.measured, 0.5);
  EXPECT_EQ(c.missed(0), 1.0);
  EXPECT_EQ(c.missed(1), 1.5);
}

// Every other assumption, dropped: the marks are no longer greedy's evictions, and the finding says why.
TEST(AgainstGreedy, NeedsRunsThatDifferInTheBinAlone) {
  const Rows rows{{1.0f}, {0.0f, 1.0f}, {0.5f, 0.25f, 0.25f}};
  const auto marks = [](const MemoryTrace& trace, const std::string& bin, const std::string& greedy) {
    return marks_are_greedys_evictions(Contest(trace, bin, greedy, kFull).duel());
  };
  const std::string bin = "dap=none,scores=full,budget=1,bin=2";
  const std::string greedy = "dap=none,scores=full";
  for (const auto& [bin_options, greedy_options, unmet] :
       {std::tuple(bin + ",recent=0", greedy + ",budget=1,recent=1", "the runs protect different tokens"),
        std::tuple(bin + ",recent=0", greedy + ",budget=1,recent=0,sinks=1",
                   "the runs protect different tokens"),
        std::tuple(bin + ",recent=0", greedy + ",budget=2,recent=0", "greedy's budget is 2, not 1"),
        std::tuple(bin + ",recent=0,ddes=batch", greedy + ",budget=1,recent=0",
                   "the bin is not filled by marking"),
        std::tuple(bin + ",recent=0,lane=kv_head", greedy + ",budget=1,recent=0",
                   "the runs evict from different lanes")}) {
    const Finding finding = marks(text_trace(rows), bin_options, greedy_options);
    EXPECT_EQ(finding.unmet, unmet);
    EXPECT_GT(finding.measured, 0.0) << unmet;
  }
  // Token 0 is a picture's: pruned by one, and 1 stays; the other keeps 0, of score 5/4, and evicts 1, of
  // 3/4. Then 2 comes with 3/4: beside 1, which has as much, 1 is the older; beside 0 it is the lower.
  MemoryTrace pruned = text_trace({{1.0f}, {0.25f, 0.75f}, {0.25f, 0.0f, 0.75f}}, 2);
  pruned.info.image = {0, -1, -1};
  const Finding finding =
      marks(pruned, "r=2,alpha=2,scores=full,budget=1,bin=2,recent=0", greedy + ",budget=1,recent=0");
  EXPECT_EQ(finding.unmet, "the runs evict different tokens in the prefill");
  EXPECT_GT(finding.measured, 0.0);
  const MemoryTrace trace = text_trace(rows);
  const std::vector<RunResult> runs = testing::run_all(trace, {"full", "random:budget=1"});
  EXPECT_EQ(marks_are_greedys_evictions({trace.info, runs[0], runs[1], kFull}).unmet,
            "the runs are not one with a recycle bin and one of greedy eviction");
}

// ---- C2.1 -------------------------------------------------------------------------------------------------

// Rows (1), (1/2, 1/2), (1/2, 1/2, 0), l = 1, D = 2. Both choose 1 in step 1 and 2 in step 2. Greedy evicts 1
// with 1/2 and 2 with 0; DDES both in step 2, when 1 has 1: 1 in all against 1/2.
TEST(CorollaryAsPrinted, IsReversed) {
  const Rows rows{{1.0f}, {0.5f, 0.5f}, {0.5f, 0.5f, 0.0f}};
  const Contest c = contest(text_trace(rows), {}, kFull);
  const Finding printed = printed_corollary(c.duel());
  EXPECT_EQ(printed.measured, 1.0);
  EXPECT_EQ(printed.bound, 0.5);
  EXPECT_EQ(printed.cases, 2);
  EXPECT_EQ(printed.verdict(), Verdict::fails);
  const Finding reversed = reversed_corollary(c.duel());
  EXPECT_EQ(reversed.measured, 0.0);  // token 2: 0 - 0; token 1: 1/2 - 1
  EXPECT_TRUE(reversed.holds());
}

TEST(CorollaryAsPrinted, SaysNothingWhereNoTokenIsEvictedByBoth) {
  const Rows rows{{1.0f}, {0.5f, 0.5f}};
  EXPECT_EQ(printed_corollary(contest(text_trace(rows), {}, kFull).duel()).unmet,
            "no token is evicted by both");
}

// Means fall. The newest is protected, so 0 is chosen in step 1 with 1.5/2; a step later, when DDES evicts
// it, it has 2/3.
TEST(CorollaryAsPrinted, IsNotReversedForMeans) {
  const Rows rows{{1.0f}, {0.5f, 0.5f}, {0.5f, 0.5f, 0.0f}};
  const Contest c(text_trace(rows), "dap=none,budget=1,bin=2,recent=1,scores=full,score=mean",
                  "dap=none,budget=1,recent=1,scores=full,score=mean", {.full = true, .sums = false});
  const Finding finding = reversed_corollary(c.duel());
  EXPECT_EQ(finding.unmet, "scores may fall");
  EXPECT_EQ(finding.measured, 1.5 / 2.0 - 2.0 / 3.0);
}

// Nor under observed scores: without 0, greedy's 1 gets all of row 2 and leaves with 3/2; in DDES's cache it
// gets half and leaves with 1.
TEST(CorollaryAsPrinted, IsNotReversedUnderObservedScores) {
  const Rows rows{{1.0f}, {0.5f, 0.5f}, {0.5f, 0.5f, 0.0f}};
  const Contest c = contest(text_trace(rows), {1, 2, 1, 1, "observed"}, kObserved);
  EXPECT_EQ(reversed_corollary(c.duel()).verdict(), Verdict::does_not_apply);
  EXPECT_EQ(reversed_corollary(c.duel()).measured, 0.5);
}

// ---- G2 and G3: scores that do not change -----------------------------------------------------------------

/// Calls check(scores) for every weak order of tokens: each way to rank them, equal ones included, once.
template <typename Check>
void for_each_order(Index tokens, const Check& check, std::vector<Index> scores = {}) {
  if (static_cast<Index>(scores.size()) == tokens) {
    const std::set<Index> ranks(scores.begin(), scores.end());
    if (*ranks.rbegin() == static_cast<Index>(ranks.size())) {
      check(scores);
    }
    return;
  }
  for (Index score = 1; score <= tokens; ++score) {
    scores.push_back(score);
    for_each_order(tokens, check, scores);
    scores.pop_back();
  }
}

/// How many of the tokens have at least a score.
Index count_from(const FixedScores& model, const std::set<Index>& tokens, Index score) {
  return std::ranges::count_if(tokens, [&](Index j) { return model.scores[at(j)] >= score; });
}

bool contains(const std::set<Index>& all, const std::set<Index>& some) {
  return std::ranges::includes(all, some);
}

/// Checks G2 for one sequence, budget and bin; returns how often greedy with l + D - 1 has more than DDES.
Index check_between(const FixedScores& model, Index budget, Index bin) {
  const auto small = model.greedy(budget);
  const auto kept = model.bin(budget, bin);
  const auto large = model.greedy(budget + bin - 1);
  Index strict = 0;
  for (std::size_t step = 0; step < kept.size(); ++step) {
    EXPECT_TRUE(contains(kept[step], small[step]));
    EXPECT_TRUE(bin > 1 || kept[step] == small[step]);  // a bin of one token is greedy
    for (Index score = 1; score <= static_cast<Index>(model.scores.size()); ++score) {
      const Index mass = count_from(model, kept[step], score);
      const Index most = count_from(model, large[step], score);
      EXPECT_LE(count_from(model, small[step], score), mass);
      EXPECT_LE(mass, most);
      strict += mass < most ? 1 : 0;
    }
  }
  return strict;
}

// Any weight that is not negative and grows with the score is a sum of steps "1 from a score on": so mass
// lies between for all of them if it does for each step. Every sequence of up to 6 tokens, every prompt
// within the budget.
TEST(FixedScores, KeepGreedysTokensAndTheMassLiesBetween) {
  Index strict = 0;
  for (Index tokens = 1; tokens <= 6; ++tokens) {
    for_each_order(tokens, [&](const std::vector<Index>& scores) {
      for (const auto& [budget, bin] : {std::pair<Index, Index>{1, 1}, {1, 2}, {1, 3}, {2, 2}, {2, 3}}) {
        for (Index prompt = 0; prompt <= std::min(budget, tokens); ++prompt) {
          strict += check_between({scores, prompt}, budget, bin);
        }
      }
    });
  }
  EXPECT_GT(strict, 1000);
}

// What DDES keeps greedy with l + D need not: with l = 1 and D = 2, of 10, 5, 6, 1 the bin is emptied with 5
// and 6 in it, then takes in 1, while greedy's three are 10, 5 and 6. No sequence of three tokens shows it,
// and none shows it for D = 1.
TEST(FixedScores, DoNotKeepWhatALargerGreedyKeeps) {
  const FixedScores model{{10, 5, 6, 1}};
  EXPECT_EQ(model.bin(1, 2).back(), (std::set<Index>{0, 3}));
  EXPECT_EQ(model.greedy(3).back(), (std::set<Index>{0, 1, 2}));
  for (Index tokens = 1; tokens <= 5; ++tokens) {
    bool is_refuted = false;
    for_each_order(tokens, [&](const std::vector<Index>& scores) {
      const FixedScores small{scores};
      for (std::size_t step = 0; step <= scores.size(); ++step) {
        is_refuted = is_refuted || !contains(small.greedy(3)[step], small.bin(1, 2)[step]);
        ASSERT_TRUE(contains(small.greedy(2)[step], small.bin(1, 1)[step]));
      }
    });
    EXPECT_EQ(is_refuted, tokens >= 4) << tokens;
  }
}

// Falling scores refute it for every l and every D >= 2: the bin is flushed when l + D are there, and what
// comes next is lower than all of them.
TEST(FixedScores, DoNotKeepWhatALargerGreedyKeepsForAnyBudgetAndBin) {
  for (Index budget = 1; budget <= 8; ++budget) {
    for (Index bin = 2; bin <= 8; ++bin) {
      FixedScores model;
      for (Index token = 0; token <= budget + bin; ++token) {
        model.scores.push_back(budget + bin - token);
      }
      EXPECT_FALSE(contains(model.greedy(budget + bin).back(), model.bin(budget, bin).back()));
    }
  }
}

/// The model as a trace: row i > 0 pays token i its score in units of 1/128 and token 0, the only one of the
/// prompt, the rest. So no token's score changes after its first but that of 0, which stays the highest: 0
/// takes one place of each budget and never leaves. The last row pays each token its score and so grows with
/// it; in the others all but 0 and the newest, which no policy has evicted, get nothing.
MemoryTrace trace_of(const std::vector<Index>& scores) {
  Rows rows{{1.0f}};
  for (const Index score : scores) {
    std::vector<float>& row = rows.emplace_back(rows.size() + 1, 0.0f);
    row.back() = static_cast<float>(score) / 128.0f;
    row.front() = 1.0f - row.back();
  }
  std::vector<float>& last = rows.emplace_back(rows.size() + 1, 0.0f);
  last.front() = 1.0f;
  for (std::size_t j = 0; j < scores.size(); ++j) {
    last[j + 1] = static_cast<float>(scores[j]) / 128.0f;
    last.front() -= last[j + 1];
  }
  return text_trace(rows);
}

std::vector<Index> draw_scores() {
  std::vector<Index> scores;
  for (Index tokens = *rc::gen::inRange<Index>(1, 10); tokens > 0; --tokens) {
    scores.push_back(*rc::gen::inRange<Index>(1, 11));
  }
  return scores;
}

// The model and the real policies keep the same tokens, and all that G2 and G3 say holds of them.
TEST(FixedScores, AreWhatTheRealPoliciesSeeInSuchATrace) {
  check_interesting("the model as a trace", 0.3, [] {
    const std::vector<Index> scores = draw_scores();
    const Index budget = *rc::gen::inRange<Index>(1, 4);
    const Index bin = *rc::gen::inRange<Index>(1, 5);
    const MemoryTrace trace = trace_of(scores);
    const Contest at_budget = contest(trace, {budget + 1, bin, budget + 1}, kFixed);
    const Contest at_peak = contest(trace, {budget + 1, bin, budget + bin}, kFixed);
    const auto expected = FixedScores{scores}.bin(budget, bin);
    const auto kept = testing::residents(trace, at_budget.runs[0], 0, 0);
    for (std::size_t step = 0; step < expected.size(); ++step) {
      std::vector<Index> tokens{0};
      for (const Index j : expected[step]) {
        tokens.push_back(j + 1);
      }
      RC_ASSERT(kept[step] == tokens);
    }
    RC_ASSERT(kept_is_superset(at_budget.duel()).holds());
    RC_ASSERT(not_worse_at_equal_budget(at_budget.duel()).holds());
    RC_ASSERT(greedy_not_worse_at_equal_peak(at_peak.duel()).holds());
    const Duel of_same_bin{trace.info, at_budget.runs[0], at_peak.runs[1], kFixed};
    RC_ASSERT(mass_is_between(at_budget.duel(), of_same_bin).holds());
    return at_budget.missed(0) < at_budget.missed(1) || at_peak.missed(1) < at_peak.missed(0);
  });
}

TEST(FixedScores, RefuteTheConverseOnTheRealPolicies) {
  // Token 0 takes a place of each budget: l = 1 + 1, and greedy has l + D = 1 + 3.
  const Contest c = contest(trace_of({10, 5, 6, 1}), {2, 2, 4}, kFixed);
  const Finding finding = kept_is_subset_of_larger(c.duel());
  EXPECT_EQ(finding.verdict(), Verdict::fails);
  // Token 4, of score 1, is in DDES's bin after step 4, where greedy evicts it. The last row's own token has
  // score 0 and fills the bin.
  EXPECT_EQ(finding.measured, 1.0);
}

// Scores that change: at equal peak greedy can be worse. T = 5, l = 1, D = 2: row i < 4 gives itself 2^-i and
// token 0 the rest, row 4 gives token 3 15/16. Greedy with budget 2 keeps 0 and 1 and evicts 2 and 3 as they
// come; DDES empties its bin of 1 and 2 in step 2, so 3 is still in it in step 4.
TEST(FixedScores, AreNeededAtEqualPeak) {
  const Rows rows{{1.0f},
                  {0.5f, 0.5f},
                  {0.75f, 0.0f, 0.25f},
                  {0.875f, 0.0f, 0.0f, 0.125f},
                  {0.0f, 0.0f, 0.0f, 0.9375f, 0.0625f}};
  const Contest c = contest(text_trace(rows), {1, 2, 2}, kFull);
  EXPECT_EQ(c.missed(0), 0.0);
  EXPECT_EQ(c.missed(1), 0.9375);
  const Finding changing = greedy_not_worse_with_changing_scores(c.duel());
  EXPECT_EQ(changing.verdict(), Verdict::fails);
  EXPECT_EQ(changing.measured, 0.9375);
  const Finding fixed = greedy_not_worse_at_equal_peak(c.duel());
  EXPECT_EQ(fixed.unmet, "scores change with time");
}

// Attention that does not grow with the score: in the model of scores 3, 2, 1 with l = 1, D = 2, greedy with
// budget 2 has 3 and 2, DDES after its flush only 3, then 3 and 1: a row that looks at the last alone.
TEST(FixedScores, NeedAttentionThatGrowsWithThem) {
  MemoryTrace trace = trace_of({4, 3, 2, 1});
  const Index last = trace.info.tokens - 1;
  std::fill_n(trace.attention[0].begin() + last * trace.info.tokens, trace.info.tokens, 0.0f);
  trace.attention[0][at(last * trace.info.tokens + 4)] = 1.0f;  // of score 1
  const Contest c = contest(trace, {2, 2, 3}, {.full = true, .fixed = true});
  const Finding finding = greedy_not_worse_at_equal_peak(c.duel());
  EXPECT_EQ(finding.unmet, "attention does not grow with the score");
  EXPECT_EQ(finding.measured, 1.0);
}

// The theorem also asks that nothing be protected and that the prompt fit. We know no counterexample without
// them; the finding says that the theorem is silent.
TEST(FixedScores, AreSilentWithProtectionAndWithALongPrompt) {
  const MemoryTrace trace = trace_of({4, 3, 2, 1});
  EXPECT_EQ(greedy_not_worse_at_equal_peak(contest(trace, {2, 2, 3, 1}, kFixed).duel()).unmet,
            "some tokens are protected");
  MemoryTrace prompt = trace;
  prompt.info.prompt = 3;
  prompt.info.prompt_rows = {0, 1, 2};
  // With D = 1 the budgets are equal, and so are the evictions of the prefill.
  EXPECT_EQ(greedy_not_worse_at_equal_peak(contest(prompt, {2, 1, 2}, kFixed).duel()).unmet,
            "the prompt exceeds the budget");
  prompt.info.prompt = 2;
  prompt.info.prompt_rows = {0, 1};
  EXPECT_TRUE(greedy_not_worse_at_equal_peak(contest(prompt, {2, 1, 2}, kFixed).duel()).applies());
}

TEST(FixedScores, AreFreeOfEvictionsWhateverRowsTheyComeFrom) {
  EXPECT_TRUE(
      marks_are_greedys_evictions(contest(trace_of({4, 3, 2, 1}), {}, {.fixed = true}).duel()).applies());
  EXPECT_EQ(marks_are_greedys_evictions(contest(trace_of({4, 3, 2, 1}), {}, kObserved).duel()).unmet,
            "scores depend on evictions");
}

// The last token, of score 0, waits in the bin at the end; greedy with l + D evicts it in the last step.
TEST(FixedScores, AreComparedAfterTheLastStepToo) {
  const Finding finding =
      kept_is_subset_of_larger(contest(trace_of({10, 5, 6, 1}), {1, 2, 3}, kFixed).duel());
  EXPECT_TRUE(finding.applies());
  EXPECT_EQ(finding.measured, 1.0);
}

}  // namespace
}  // namespace hae::analysis
