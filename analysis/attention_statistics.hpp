#pragma once

#include <array>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sim/replay.hpp"

namespace hae::analysis {

/// How many probabilities of a population there are, and how many of them are at most a threshold.
struct SparseCount {
  Index sparse = 0;
  Index probabilities = 0;

  SparseCount& operator+=(const SparseCount& other);

  /// None of an empty population.
  [[nodiscard]] std::optional<double> share() const;
};

/// The probabilities of some rows, by what their key is.
struct Sparsity {
  SparseCount visual;
  SparseCount text;

  [[nodiscard]] SparseCount all() const;
};

/// Attention that prompt tokens of one kind receive from prompt text, A_j of HAE Eq. (1) for each of them:
/// mean and population variance, Σ (A_j - mean)² / tokens, over the tokens.
struct ColumnSums {
  Index tokens = 0;
  double mean = 0;
  double variance = 0;
};

/// What a token is to a decode row.
enum class KeyKind { visual, prompt_text, generated };
inline constexpr std::array kKeyKinds = {KeyKind::visual, KeyKind::prompt_text, KeyKind::generated};

/// Attention that decode rows pay to tokens of one kind and of some ages.
struct AgedAttention {
  double sum = 0;
  Index probabilities = 0;

  /// None where no row could see such a token.
  [[nodiscard]] std::optional<double> mean() const;
};

/// Ages, in steps since a token was written: 0 (the query's own token), 1, 2, 3-4, 5-8, ..., each bin twice
/// as wide as the one before.
Index age_bin(Index age);

/// The ages of a bin.
Range ages_of_bin(Index bin);

/// What the attention of one layer looks like, before any eviction.
struct AttentionStatistics {
  Sparsity prefill;
  Sparsity decode;
  std::optional<ColumnSums> visual_columns;  ///< none without such tokens
  std::optional<ColumnSums> text_columns;
  std::array<std::vector<AgedAttention>, kKeyKinds.size()> age;  ///< by KeyKind: [age_bin(T - 1) + 1]
  Index masked_rows = 0;
  Index lowered_weights = 0;
};

struct StatisticsOptions {
  double threshold = 1e-4;  ///< a probability at most this is sparse
  NanRule nan = NanRule::error;

  /// Runs layers; empty: one after another. It never changes a result.
  ForEach for_each;

  /// Query rows formed at a time; 0 chooses. It never changes a result.
  Index block_rows = 0;

  /// Also observes the prompt's rows, over all keys, as a policy does before it evicts anything: blocks of
  /// one layer ascend and come one after another, layers come on any thread.
  std::function<void(const Rows&)> observe_prompt;

  /// As ReplayOptions::progress.
  std::function<void(double)> progress;
};

/// Reads one sequence once, in blocks of rows, and describes the attention of each layer.
///
///   sparsity      of a_j = w_j / (sum of w over all keys), float32, over all (query head, row, key the mask
///                 allows): how many are <= threshold, compared in double. Prompt rows are those the trace
///                 stores
///   column sums   A_j = Σ over stored prompt text rows i of a_ij, a_ij = mean over all query heads of the
///                 layer, for every prompt token j that at least one of these rows can see
///   age           over all (decode row, query head, key the mask allows): the a_j of keys that are i - j
///                 steps old
///
/// A row without mass is masked: it is counted, and is in no sparsity and no age; to a_ij it adds nothing.
///
/// order    A_j: heads ascending, divided by their number, then rows ascending; mean and variance: tokens
///          ascending, the variance in a second pass; ages: rows ascending, then heads, then keys; all in
///          double
/// where    begins the message of an error
/// returns  [layers]
/// throws   TraceError for a payload that breaks the format
std::vector<AttentionStatistics> attention_statistics(Sequence& sequence, const StatisticsOptions& options,
                                                      const std::string& where);

/// One description of several layers: counts and sums of attention are added up, means and variances of
/// column sums are averaged over the layers that have them, all in the order given. `tokens` of column sums
/// is the most of any layer.
AttentionStatistics over_layers(std::span<const AttentionStatistics> layers);

}  // namespace hae::analysis
