#include <gtest/gtest.h>
// RapidCheck needs GoogleTest first.
#include <rapidcheck/gtest.h>

#include <cmath>
#include <thread>

#include "analysis/attention_statistics.hpp"
#include "testing/generators.hpp"
#include "testing/memory_trace.hpp"
#include "tests/support/interesting.hpp"

namespace hae::analysis {
namespace {

using testing::MemoryTrace;

std::vector<AttentionStatistics> described(const MemoryTrace& trace, const StatisticsOptions& options) {
  testing::MemorySequence sequence(trace);
  return attention_statistics(sequence, options, "memory");
}

bool same(const std::optional<ColumnSums>& a, const std::optional<ColumnSums>& b) {
  return a.has_value() == b.has_value() &&
         (!a || (a->tokens == b->tokens && a->mean == b->mean && a->variance == b->variance));
}

bool same(const SparseCount& a, const SparseCount& b) {
  return a.sparse == b.sparse && a.probabilities == b.probabilities;
}

bool same(const AttentionStatistics& a, const AttentionStatistics& b) {
  bool equal = same(a.prefill.visual, b.prefill.visual) && same(a.prefill.text, b.prefill.text) &&
               same(a.decode.visual, b.decode.visual) && same(a.decode.text, b.decode.text) &&
               same(a.visual_columns, b.visual_columns) && same(a.text_columns, b.text_columns) &&
               a.masked_rows == b.masked_rows;
  for (std::size_t kind = 0; kind < a.age.size(); ++kind) {
    equal = equal && a.age[kind].size() == b.age[kind].size();
    for (std::size_t bin = 0; equal && bin < a.age[kind].size(); ++bin) {
      equal = a.age[kind][bin].sum == b.age[kind][bin].sum &&
              a.age[kind][bin].probabilities == b.age[kind][bin].probabilities;
    }
  }
  return equal;
}

/// Layers in the opposite order, each on a thread of its own.
void backwards(Index count, const std::function<void(Index)>& task) {
  for (Index i = count; i-- > 0;) {
    std::thread(task, i).join();
  }
}

TEST(AttentionStatistics, DependOnNeitherBlocksNorTheOrderOfLayers) {
  testing::check_interesting("the size of a block and threads change no figure", 0.2, [] {
    const MemoryTrace trace = *rc::gen::oneOf(testing::attention_traces(), testing::qkv_traces());
    const std::vector<AttentionStatistics> whole = described(trace, {});
    const std::vector<AttentionStatistics> blocks =
        described(trace, {.for_each = backwards, .block_rows = *rc::gen::inRange<Index>(1, 8)});
    RC_ASSERT(whole.size() == blocks.size());
    for (std::size_t layer = 0; layer < whole.size(); ++layer) {
      RC_ASSERT(same(whole[layer], blocks[layer]));
    }
    return trace.info.tokens > 8 && trace.info.layers > 1;
  });
}

// Every unmasked row spends a mass of 1 on its keys, so the attention of all ages of all kinds is the number
// of such rows: within the tolerance of a recorded row, or for recomputed ones (T/32 + 6) 2^-23 a row.
TEST(AttentionStatistics, AgesShareOutTheWholeMassOfTheDecodeRows) {
  testing::check_interesting("the sum over ages and kinds is the number of rows", 0.2, [] {
    const MemoryTrace trace = *rc::gen::oneOf(testing::attention_traces(), testing::qkv_traces());
    Index spread = 0;
    for (const AttentionStatistics& layer : described(trace, {})) {
      double mass = 0.0;
      Index probabilities = 0;
      for (const std::vector<AgedAttention>& bins : layer.age) {
        for (const AgedAttention& aged : bins) {
          mass += aged.sum;
          probabilities += aged.probabilities;
        }
      }
      RC_ASSERT(probabilities == layer.decode.all().probabilities);
      // Each row has a key of age 0, its own, so these are counted by the first bin.
      const AgedAttention& own = layer.age[static_cast<std::size_t>(KeyKind::generated)].front();
      const auto rows = static_cast<double>(own.probabilities);
      const double tolerance = static_cast<double>(trace.info.tokens / 32 + 6) * 0x1p-23;
      RC_ASSERT(std::abs(mass - rows) <= rows * tolerance);
      spread += own.probabilities > 0 && probabilities > own.probabilities ? 1 : 0;
    }
    return spread > 0;
  });
}

}  // namespace
}  // namespace hae::analysis
