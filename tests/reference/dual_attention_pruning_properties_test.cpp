#include <gtest/gtest.h>
// RapidCheck needs GoogleTest first.
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "testing/generators.hpp"
#include "testing/memory_trace.hpp"
#include "tests/support/interesting.hpp"
#include "tests/support/policy_specs.hpp"

// DAP against a brute force on the trace's own numbers, one plain loop at a time.

namespace hae {
namespace {

using testing::attention_traces;
using testing::MemoryTrace;
using testing::run;

testing::TraceBounds exact() {
  testing::TraceBounds bounds;
  bounds.dyadic = true;  // sums over heads and rows are exact, so the brute force may add in any order
  bounds.allow_masked = false;
  bounds.prunable = true;
  bounds.least_tokens = 12;
  return bounds;
}

struct Mass {
  double sum = 0;
  double largest = 0;
};

/// A_j and max_i a_ij of layer 0 for the candidates.
std::map<Index, Mass> candidates(const MemoryTrace& trace) {
  const SequenceInfo& info = trace.info;
  std::map<Index, Mass> masses;
  for (Index i = 0; i < info.prompt; ++i) {
    for (Index j = 0; j < i && !info.is_visual(i); ++j) {
      if (!info.is_visual(j)) {
        continue;
      }
      double a = 0.0;
      for (Index h = 0; h < info.query_heads; ++h) {
        a += static_cast<double>(
            trace.attention[0][static_cast<std::size_t>((h * info.tokens + i) * info.tokens + j)]);
      }
      a /= static_cast<double>(info.query_heads);
      masses[j].sum += a;
      masses[j].largest = std::max(masses[j].largest, a);
    }
  }
  return masses;
}

std::set<Index> evicted_in(const RunResult& result, Index layer) {
  std::set<Index> tokens;
  for (const LogEntry& entry : result.log.entries) {
    if (entry.layer == layer) {
      tokens.insert(entry.token);
    }
  }
  return tokens;
}

TEST(DualAttentionPruning, EvictsExactlyWhatBothTestsName) {
  testing::check_interesting("both tests", 0.1, [] {
    const MemoryTrace trace = *attention_traces(exact());
    const double r = *rc::gen::element(0.0625, 0.25, 0.5);
    const double alpha = *rc::gen::element(0.125, 0.5, 2.0);
    RunResult result = run(trace, "hae:ddes=none,r=" + std::to_string(r) + ",alpha=" + std::to_string(alpha));
    const std::map<Index, Mass> masses = candidates(trace);
    double total = 0.0;
    for (const auto& [token, mass] : masses) {
      total += mass.sum;
    }
    std::set<Index> expected;
    for (const auto& [token, mass] : masses) {
      if (mass.sum < r * total && mass.largest < alpha) {
        expected.insert(token);
      }
    }
    for (Index layer = 0; layer < trace.info.layers; ++layer) {
      RC_ASSERT(evicted_in(result, layer) == expected);
    }
    return !expected.empty();
  });
}

RC_GTEST_PROP(DualAttentionPruning, LosesLessThanItsBounds, ()) {
  // With at least one text row and C the evicted set: Σ_C A_j < |C| min(r A_V, alpha rows).
  const MemoryTrace trace = *attention_traces(exact());
  const double alpha = *rc::gen::element(0.25, 0.5, 2.0);
  RunResult result = run(trace, "hae:ddes=none,r=0.5,alpha=" + std::to_string(alpha));
  const std::map<Index, Mass> masses = candidates(trace);
  double total = 0.0;
  for (const auto& [token, mass] : masses) {
    total += mass.sum;
  }
  const std::set<Index> evicted = evicted_in(result, 0);
  RC_PRE(!evicted.empty());
  double lost = 0.0;
  for (const Index token : evicted) {
    lost += masses.at(token).sum;
  }
  const Index rows =
      std::ranges::count_if(trace.info.image.begin(), trace.info.image.begin() + trace.info.prompt,
                            [](Index image) { return image < 0; });
  const auto count = static_cast<double>(evicted.size());
  RC_ASSERT(lost < count * std::min(0.5 * total, alpha * static_cast<double>(rows)));
}

RC_GTEST_PROP(DualAttentionPruning, MassKeepsItsGuaranteeAndNoRuleEvictsMore, ()) {
  const MemoryTrace trace = *attention_traces(exact());
  const double eps = *rc::gen::element(0.0, 0.125, 0.25, 0.5);
  RunResult result = run(trace, "hae:ddes=none,dap=mass,eps=" + std::to_string(eps));
  const std::map<Index, Mass> masses = candidates(trace);
  double total = 0.0;
  std::vector<double> sums;
  for (const auto& [token, mass] : masses) {
    total += mass.sum;
    sums.push_back(mass.sum);
  }
  RC_PRE(total > 0.0);
  const std::set<Index> evicted = evicted_in(result, 0);
  double lost = 0.0;
  for (const Index token : evicted) {
    lost += masses.at(token).sum;
  }
  RC_ASSERT(lost <= eps * total);
  // The lowest ones are the cheapest set of their size, so one more token of any choice costs too much.
  std::ranges::sort(sums);
  double cheapest = 0.0;
  for (std::size_t i = 0; i <= evicted.size() && i < sums.size(); ++i) {
    cheapest += sums[i];
  }
  RC_ASSERT(evicted.size() == sums.size() || cheapest > eps * total);
}

}  // namespace
}  // namespace hae
