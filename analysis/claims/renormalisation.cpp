#include "analysis/claims/renormalisation.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sim/row_kernels.hpp"

namespace hae::analysis {
namespace {

std::vector<float> padded(std::span<const float> row) {
  std::vector<float> result(at(kernels::padded(static_cast<Index>(row.size()))), 0.0f);
  std::ranges::copy(row, result.begin());
  return result;
}

double norm(std::span<const double> vector) {
  double squares = 0.0;
  for (const double x : vector) {
    squares += x * x;
  }
  return std::sqrt(squares);
}

/// A row's sums as the engine forms them and in double, and where it has nothing to say.
struct Sums {
  Index keys = 0;
  Index evicted_tokens = 0;
  double all = 0;        ///< Σ_all w in double, ascending
  double resident = 0;   ///< Σ_S w
  double evicted = 0;    ///< Σ_E w
  double missed = 0;     ///< m as the engine measures it
  double kept = 0;       ///< 1 - m, from Σ_S w, as the engine's KL takes it
  double exact = 0;      ///< relative error of a_j, a'_j and sums of them in double
  double canonical = 0;  ///< relative error of `missed` and `kept`
  std::string unmet;

  explicit Sums(const AttentionRow& row) : keys(static_cast<Index>(row.weights.size())) {
    HAE_EXPECTS(row.keep.size() == row.weights.size());
    for (std::size_t j = 0; j < row.weights.size(); ++j) {
      HAE_EXPECTS(row.weights[j] >= 0.0f && std::isfinite(row.weights[j]));
      HAE_EXPECTS(row.keep[j] == 0.0f || row.keep[j] == 1.0f);
      const auto w = static_cast<double>(row.weights[j]);
      all += w;
      (row.keep[j] == 1.0f ? resident : evicted) += w;
      evicted_tokens += row.keep[j] == 0.0f ? 1 : 0;
    }
    exact = rounding_of(3 * keys + 8);
    canonical = 2.0 * canonical_rounding_of(keys) + exact;
    if (all == 0.0) {
      unmet = "the row has no mass";
      return;
    }
    const std::vector<float> w = padded(row.weights);
    const std::vector<float> keep = padded(row.keep);
    const auto length = static_cast<Index>(w.size());
    const auto total = static_cast<double>(kernels::sum(w.data(), length));
    missed = std::min(1.0, static_cast<double>(kernels::sum_dropped(w.data(), keep.data(), length)) / total);
    kept = static_cast<double>(kernels::sum_kept(w.data(), keep.data(), length)) / total;
    if (resident == 0.0) {
      unmet = "no mass is left to the residents";
    }
  }
};

/// Outputs of a row, in double: Σ over keys, ascending.
struct Outputs {
  std::vector<double> full;      ///< o
  std::vector<double> evicted;   ///< v̄_E
  std::vector<double> resident;  ///< o' = v̄_S
  double error = 0;              ///< of each vector's length, absolutely

  Outputs(const AttentionRow& row, const Sums& sums) {
    const Index head_dim = row.values.extent(1);
    HAE_EXPECTS(row.values.extent(0) >= sums.keys);
    full.assign(at(head_dim), 0.0);
    evicted = full;
    resident = full;
    double largest = 0.0;  // of |v|
    for (Index j = 0; j < sums.keys; ++j) {
      const auto w = static_cast<double>(row.weights[at(j)]);
      const bool is_resident = row.keep[at(j)] == 1.0f;
      std::vector<double>& part = is_resident ? resident : evicted;
      for (Index d = 0; d < head_dim; ++d) {
        const auto v = static_cast<double>(row.values[j][d]);
        largest = std::max(largest, std::abs(v));
        full[at(d)] += w / sums.all * v;
        part[at(d)] += w / (is_resident ? sums.resident : sums.evicted) * v;
      }
    }
    // Each coordinate is a mean of numbers up to `largest` and off by that times the error of its terms.
    error = (sums.exact + rounding_of(head_dim + 3)) * std::sqrt(static_cast<double>(head_dim)) * largest;
  }
};

std::vector<double> difference(std::span<const double> a, std::span<const double> b) {
  std::vector<double> result;
  for (std::size_t i = 0; i < a.size(); ++i) {
    result.push_back(a[i] - b[i]);
  }
  return result;
}

Finding identity(const Sums& sums, double measured, double bound, double rounding) {
  return {sums.unmet, Finding::Relation::equal, measured, bound, rounding, 1};
}

/// Where there is nothing to measure.
Finding inapplicable(const std::string& unmet, Index cases = 1) {
  Finding finding;
  finding.unmet = unmet;
  finding.cases = cases;
  return finding;
}

RowFindings findings_of(const AttentionRow& row, double diameter) {
  RowFindings found{total_variation(row), kl_divergence(row), {}, {}, {}};
  if (row.values.empty()) {
    found.output = found.diameter = found.one_token = inapplicable("the trace has no values");
  } else {
    found.output = output_identity(row);
    found.diameter = output_within_diameter(row, diameter);
    found.one_token = output_without_one_token(row);
  }
  return found;
}

RowFindings worse(const RowFindings& a, const RowFindings& b) {
  return {analysis::worse(a.variation, b.variation), analysis::worse(a.kl, b.kl),
          analysis::worse(a.output, b.output), analysis::worse(a.diameter, b.diameter),
          analysis::worse(a.one_token, b.one_token)};
}

/// Looks at one layer's decode rows with what a run had evicted by then.
class LayerWatch final : public LayerDecode {
 public:
  LayerWatch(Sequence& sequence, const RunResult& run, Index layer, std::optional<RowFindings>& found)
      : info_(sequence.info()), run_(run), layer_(layer), found_(found) {
    keep_.assign(at(lane_count(info_, run.lanes)), std::vector<float>(at(info_.tokens), 1.0f));
    if (info_.has_values) {
      payload_ = sequence.layer(layer);
      values_ = payload_->values();
    }
    for (Index head = 0; head < info_.kv_heads; ++head) {
      diameters_.push_back(values_.empty() ? 0.0 : diameter_bound(values_[head]));
    }
  }

  Decision step(const Rows& rows, const LayerCache& /*cache*/) override {
    const Index keys = rows.query(0) + 1;
    evict_before(keys - info_.prompt);
    for (Index head = 0; head < info_.query_heads; ++head) {
      const Index kv_head = head / info_.group_heads();
      const std::span<const double> a = rows.head(Attention::full, head, 0);
      weights_.assign(a.begin(), a.begin() + keys);
      const std::vector<float>& keep = keep_[run_.lanes == LaneKind::layer ? 0 : at(kv_head)];
      const AttentionRow row{weights_, std::span(keep).first(at(keys)),
                             values_.empty() ? View<const float, 2>() : values_[kv_head]};
      const RowFindings found = findings_of(row, diameters_[at(kv_head)]);
      found_ = found_ ? worse(*found_, found) : found;
    }
    return {};
  }

 private:
  /// What has left before the attention of a step. The log is sorted by steps.
  void evict_before(Index step) {
    for (; next_ < run_.log.entries.size() && run_.log.entries[next_].step < step; ++next_) {
      const LogEntry& entry = run_.log.entries[next_];
      if (entry.layer == layer_) {
        keep_[entry.lane == kLayerLane ? 0 : at(entry.lane)][at(entry.token)] = 0.0f;
      }
    }
  }

  const SequenceInfo& info_;
  const RunResult& run_;
  Index layer_;
  std::optional<RowFindings>& found_;
  std::unique_ptr<LayerPayload> payload_;
  View<const float, 3> values_;
  std::vector<double> diameters_;         ///< [kv_heads]
  std::vector<std::vector<float>> keep_;  ///< [lanes][T]
  std::vector<float> weights_;
  std::size_t next_ = 0;
};

/// Evicts nothing and looks at every layer. Layers write to entries of their own.
class RowWatch final : public Policy {
 public:
  RowWatch(Sequence& sequence, const RunResult& run, std::vector<std::optional<RowFindings>>& found)
      : sequence_(sequence), run_(run), found_(found) {}

  [[nodiscard]] std::string spec() const override { return "rows"; }
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> options() const override { return {}; }
  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override { return {}; }
  [[nodiscard]] std::unique_ptr<Run> begin(const SequenceInfo& /*info*/) const override {
    return std::make_unique<State>(*this);
  }

 private:
  struct State final : Run {
    explicit State(const RowWatch& of) : watch(of) {}
    std::unique_ptr<LayerDecode> decode(Index layer) override {
      return std::make_unique<LayerWatch>(watch.sequence_, watch.run_, layer, watch.found_[at(layer)]);
    }
    [[nodiscard]] Limits limits(Index /*layer*/, Index /*lane*/) const override { return {}; }

    const RowWatch& watch;
  };

  Sequence& sequence_;
  const RunResult& run_;
  std::vector<std::optional<RowFindings>>& found_;  ///< [layers]
};

}  // namespace

RowFindings decode_row_findings(Sequence& sequence, const RunResult& run, const ReplayOptions& options,
                                const std::string& where) {
  HAE_EXPECTS(!run.merges);
  const SequenceInfo& info = sequence.info();
  if (info.steps() == 0) {
    const Finding none = inapplicable("the sequence has no decode step", 0);
    return {none, none, none, none, none};
  }
  std::vector<std::optional<RowFindings>> found(at(info.layers));
  ReplayOptions decode_only = options;
  decode_only.prompt_rows = false;
  replay(sequence, {std::make_shared<RowWatch>(sequence, run, found)}, decode_only, where);
  RowFindings worst = found.front().value();
  for (std::size_t layer = 1; layer < found.size(); ++layer) {
    worst = worse(worst, found[layer].value());
  }
  return worst;
}

Finding total_variation(const AttentionRow& row) {
  const Sums sums(row);
  if (!sums.unmet.empty()) {
    return inapplicable(sums.unmet);
  }
  double variation = 0.0;
  for (std::size_t j = 0; j < row.weights.size(); ++j) {
    const auto w = static_cast<double>(row.weights[j]);
    variation += std::abs(w / sums.all - (row.keep[j] == 1.0f ? w / sums.resident : 0.0));
  }
  variation /= 2.0;
  // ½ Σ (a + a') = 1 bears the error of the terms.
  return identity(sums, variation, sums.missed, 2.0 * sums.exact + sums.canonical * sums.missed);
}

Finding kl_divergence(const AttentionRow& row) {
  const Sums sums(row);
  if (!sums.unmet.empty()) {
    return inapplicable(sums.unmet);
  }
  double divergence = 0.0;
  for (std::size_t j = 0; j < row.weights.size(); ++j) {
    const auto w = static_cast<double>(row.weights[j]);
    if (row.keep[j] == 1.0f && w > 0.0) {
      divergence += w / sums.resident * std::log(w / sums.resident / (w / sums.all));
    }
  }
  const double bound = std::max(0.0, -std::log(sums.kept));
  // A relative error e of a logarithm's argument moves it by at most e / (1 - e); libm's own is within 4 u.
  const double canonical = sums.canonical / (1.0 - sums.canonical);
  return identity(sums, divergence, bound,
                  canonical + 2.0 * sums.exact + (2.0 * sums.exact + rounding_of(8)) * (divergence + bound));
}

Finding output_identity(const AttentionRow& row) {
  const Sums sums(row);
  if (!sums.unmet.empty()) {
    return inapplicable(sums.unmet);
  }
  if (sums.evicted == 0.0) {
    return inapplicable("no mass is missed");
  }
  const Outputs outputs(row, sums);
  const double distance = norm(difference(outputs.evicted, outputs.resident));
  return identity(sums, norm(difference(outputs.full, outputs.resident)), sums.missed * distance,
                  2.0 * (1.0 + sums.missed) * outputs.error + sums.canonical * sums.missed * distance);
}

Finding output_within_diameter(const AttentionRow& row, double diameter) {
  HAE_EXPECTS(diameter >= 0.0);
  const Sums sums(row);
  if (!sums.unmet.empty()) {
    return inapplicable(sums.unmet);
  }
  const Outputs outputs(row, sums);
  const double bound = sums.missed * diameter;
  return {"",
          Finding::Relation::at_most,
          norm(difference(outputs.full, outputs.resident)),
          bound,
          2.0 * outputs.error + sums.canonical * bound,
          1};
}

Finding output_without_one_token(const AttentionRow& row) {
  const Sums sums(row);
  if (!sums.unmet.empty()) {
    return inapplicable(sums.unmet);
  }
  if (sums.evicted_tokens != 1) {
    return inapplicable(std::to_string(sums.evicted_tokens) + " tokens are evicted, not one");
  }
  const Outputs outputs(row, sums);
  const auto token = std::ranges::find(row.keep, 0.0f) - row.keep.begin();
  std::vector<double> pull = outputs.full;
  for (Index d = 0; d < row.values.extent(1); ++d) {
    pull[at(d)] -= static_cast<double>(row.values[token][d]);
  }
  const double odds = sums.evicted / sums.resident;  // p / (1 - p), without cancellation
  const double bound = odds * norm(pull);
  return identity(sums, norm(difference(outputs.full, outputs.resident)), bound,
                  (2.0 + 2.0 * odds) * outputs.error + sums.exact * bound);
}

double diameter_bound(View<const float, 2> values) {
  double largest = 0.0;
  for (Index i = 0; i < values.extent(0); ++i) {
    for (Index j = 0; j < i; ++j) {
      double squares = 0.0;
      for (Index d = 0; d < values.extent(1); ++d) {
        const double x = static_cast<double>(values[i][d]) - static_cast<double>(values[j][d]);
        squares += x * x;
      }
      largest = std::max(largest, squares);
    }
  }
  return std::sqrt(largest) * (1.0 + rounding_of(values.extent(1) + 6));
}

}  // namespace hae::analysis
