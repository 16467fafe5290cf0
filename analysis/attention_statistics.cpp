#include "analysis/attention_statistics.hpp"

#include <algorithm>
#include <bit>

#include "sim/active_run.hpp"
#include "sim/row_kernels.hpp"
#include "sim/row_progress.hpp"
#include "sim/weights.hpp"

namespace hae::analysis {
namespace {

/// What keys are to the rows of a decode step.
std::vector<KeyKind> key_kinds(const SequenceInfo& info) {
  std::vector<KeyKind> kinds;
  for (Index j = 0; j < info.tokens; ++j) {
    kinds.push_back(j >= info.prompt    ? KeyKind::generated
                    : info.is_visual(j) ? KeyKind::visual
                                        : KeyKind::prompt_text);
  }
  return kinds;
}

/// A_j of the prompt's tokens.
class Columns {
 public:
  explicit Columns(const SequenceInfo& info) : info_(info), sums_(at(info.prompt)), seen_(at(info.prompt)) {}

  void observe(const Rows& rows) {
    for (Index r = 0; r < rows.rows(); ++r) {
      if (info_.is_visual(rows.query(r))) {
        continue;
      }
      const std::span<const double> a =
          rows.values({LaneKind::layer, HeadReduction::mean, Attention::full}, 0, r);
      for (const Range& range : rows.visible(r)) {
        for (Index j = range.begin; j < range.end; ++j) {
          sums_[at(j)] += a[at(j)];
          seen_[at(j)] = true;
        }
      }
    }
  }

  [[nodiscard]] std::optional<ColumnSums> describe(bool visual) const {
    std::vector<double> sums;
    for (Index j = 0; j < info_.prompt; ++j) {
      if (info_.is_visual(j) == visual && seen_[at(j)]) {
        sums.push_back(sums_[at(j)]);
      }
    }
    if (sums.empty()) {
      return std::nullopt;
    }
    ColumnSums columns{.tokens = static_cast<Index>(sums.size())};
    for (const double sum : sums) {
      columns.mean += sum;
    }
    columns.mean /= static_cast<double>(sums.size());
    for (const double sum : sums) {
      columns.variance += (sum - columns.mean) * (sum - columns.mean);
    }
    columns.variance /= static_cast<double>(sums.size());
    return columns;
  }

 private:
  const SequenceInfo& info_;
  std::vector<double> sums_;
  std::vector<bool> seen_;
};

/// Calls visit(key, probability) for the keys that a row sees, ascending; for none when the row is masked.
template <typename Visit>
void visit_row(const WeightBlock& block, Index head, Index row, const Visit& visit) {
  const float sum = block.sum(head, row);
  if (sum == 0.0f) {
    return;
  }
  const float* weights = block.row(head, row);
  for (const Range& range : block.visible[at(row)]) {
    for (Index j = range.begin; j < range.end; ++j) {
      visit(j, static_cast<double>(weights[j] / sum));
    }
  }
}

class Description {
 public:
  Description(Sequence& sequence, const StatisticsOptions& options, const std::string& where)
      : sequence_(sequence),
        info_(sequence.info()),
        options_(options),
        where_(where + ": sequence '" + sequence.info().name + "'"),
        kinds_(key_kinds(sequence.info())),
        progress_(options.progress,
                  info_.layers * (static_cast<Index>(info_.prompt_rows.size()) + info_.steps())) {
    check_info(info_, where_);
  }

  AttentionStatistics layer(Index layer) {
    const std::unique_ptr<LayerPayload> payload = sequence_.layer(layer);
    LayerWeights weights(info_, layer, info_.tokens, *payload, options_.nan, where_);
    AttentionStatistics statistics;
    read_prompt(weights, statistics);
    read_decode(weights, statistics);
    statistics.masked_rows = weights.masked_rows();
    statistics.lowered_weights = weights.lowered();
    return statistics;
  }

 private:
  void read_prompt(LayerWeights& weights, AttentionStatistics& statistics) {
    Columns columns(info_);
    const auto stored = static_cast<Index>(info_.prompt_rows.size());
    const Index at_a_time = block_rows();
    WeightBlock block;
    for (Index begin = 0; begin < stored; begin += at_a_time) {
      weights.prompt({begin, std::min(stored, begin + at_a_time)}, block);
      count_sparse(block, statistics.prefill);
      const std::vector<float> everything(at(block.stride), 1.0f);
      std::vector<Index> all(at(block.rows()));
      for (Index r = 0; r < block.rows(); ++r) {
        all[at(r)] = r;
      }
      const Rows rows(block, std::move(all), {everything});
      columns.observe(rows);
      if (options_.observe_prompt) {
        options_.observe_prompt(rows);
      }
      progress_.add(block.rows());
    }
    statistics.visual_columns = columns.describe(true);
    statistics.text_columns = columns.describe(false);
  }

  void read_decode(LayerWeights& weights, AttentionStatistics& statistics) {
    for (std::vector<AgedAttention>& bins : statistics.age) {
      bins.resize(at(age_bin(info_.tokens - 1) + 1));
    }
    const Index at_a_time = block_rows();
    WeightBlock block;
    for (Index begin = 1; begin <= info_.steps(); begin += at_a_time) {
      weights.decode({begin, std::min(info_.steps() + 1, begin + at_a_time)}, block);
      count_sparse(block, statistics.decode);
      for (Index r = 0; r < block.rows(); ++r) {
        add_ages(block, r, statistics);
      }
      progress_.add(block.rows());
    }
  }

  void count_sparse(const WeightBlock& block, Sparsity& sparsity) const {
    for (Index h = 0; h < block.query_heads; ++h) {
      for (Index r = 0; r < block.rows(); ++r) {
        visit_row(block, h, r, [&](Index j, double a) {
          SparseCount& count = info_.is_visual(j) ? sparsity.visual : sparsity.text;
          ++count.probabilities;
          count.sparse += a <= options_.threshold ? 1 : 0;
        });
      }
    }
  }

  void add_ages(const WeightBlock& block, Index row, AttentionStatistics& statistics) const {
    const Index query = block.queries[at(row)];
    for (Index h = 0; h < block.query_heads; ++h) {
      visit_row(block, h, row, [&](Index j, double a) {
        AgedAttention& aged = statistics.age[static_cast<std::size_t>(kinds_[at(j)])][at(age_bin(query - j))];
        aged.sum += a;
        ++aged.probabilities;
      });
    }
  }

  [[nodiscard]] Index block_rows() const {
    return options_.block_rows > 0 ? options_.block_rows : weight_block_rows(info_);
  }

  Sequence& sequence_;
  const SequenceInfo& info_;
  const StatisticsOptions& options_;
  std::string where_;
  std::vector<KeyKind> kinds_;
  RowProgress progress_;
};

std::optional<ColumnSums> averaged(std::span<const AttentionStatistics> layers,
                                   std::optional<ColumnSums> AttentionStatistics::*columns) {
  ColumnSums average;
  Index present = 0;
  for (const AttentionStatistics& layer : layers) {
    if (const std::optional<ColumnSums>& of_layer = layer.*columns) {
      average.tokens = std::max(average.tokens, of_layer->tokens);
      average.mean += of_layer->mean;
      average.variance += of_layer->variance;
      ++present;
    }
  }
  if (present == 0) {
    return std::nullopt;
  }
  average.mean /= static_cast<double>(present);
  average.variance /= static_cast<double>(present);
  return average;
}

}  // namespace

SparseCount& SparseCount::operator+=(const SparseCount& other) {
  sparse += other.sparse;
  probabilities += other.probabilities;
  return *this;
}

std::optional<double> SparseCount::share() const {
  return probabilities == 0 ? std::nullopt
                            : std::optional(static_cast<double>(sparse) / static_cast<double>(probabilities));
}

SparseCount Sparsity::all() const {
  SparseCount count = visual;
  return count += text;
}

std::optional<double> AgedAttention::mean() const {
  return probabilities == 0 ? std::nullopt : std::optional(sum / static_cast<double>(probabilities));
}

Index age_bin(Index age) {
  HAE_EXPECTS(age >= 0);
  return age == 0 ? 0 : 1 + std::bit_width(static_cast<std::uint64_t>(age - 1));
}

Range ages_of_bin(Index bin) {
  HAE_EXPECTS(bin >= 0 && bin < 63);
  return bin < 2 ? Range{bin, bin + 1} : Range{(Index{1} << (bin - 2)) + 1, (Index{1} << (bin - 1)) + 1};
}

std::vector<AttentionStatistics> attention_statistics(Sequence& sequence, const StatisticsOptions& options,
                                                      const std::string& where) {
  check_floating_point_mode();
  Description description(sequence, options, where);
  std::vector<AttentionStatistics> layers(at(sequence.info().layers));
  for_each(options.for_each, sequence.info().layers,
           [&](Index layer) { layers[at(layer)] = description.layer(layer); });
  return layers;
}

AttentionStatistics over_layers(std::span<const AttentionStatistics> layers) {
  AttentionStatistics total;
  for (const AttentionStatistics& layer : layers) {
    total.prefill.visual += layer.prefill.visual;
    total.prefill.text += layer.prefill.text;
    total.decode.visual += layer.decode.visual;
    total.decode.text += layer.decode.text;
    for (std::size_t kind = 0; kind < total.age.size(); ++kind) {
      total.age[kind].resize(std::max(total.age[kind].size(), layer.age[kind].size()));
      for (std::size_t bin = 0; bin < layer.age[kind].size(); ++bin) {
        total.age[kind][bin].sum += layer.age[kind][bin].sum;
        total.age[kind][bin].probabilities += layer.age[kind][bin].probabilities;
      }
    }
    total.masked_rows += layer.masked_rows;
    total.lowered_weights += layer.lowered_weights;
  }
  total.visual_columns = averaged(layers, &AttentionStatistics::visual_columns);
  total.text_columns = averaged(layers, &AttentionStatistics::text_columns);
  return total;
}

}  // namespace hae::analysis
