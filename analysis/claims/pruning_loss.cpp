#include "analysis/claims/pruning_loss.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <set>
#include <utility>

namespace hae::analysis {
namespace {

/// Adds up the text rows of one layer, as DAP does.
class PruningSums {
 public:
  /// evicted  ascending positions below `prompt`
  PruningSums(Index prompt, std::vector<Index> evicted)
      : evicted_(std::move(evicted)), sums_(at(prompt), 0.0), is_candidate_(at(prompt), false) {}

  /// attention  [at least the last position of `seen` + 1] of one text row
  void add(std::span<const double> attention, std::span<const Range> seen) {
    ++text_rows_;
    for (const Range& range : seen) {
      for (Index j = range.begin; j < range.end; ++j) {
        sums_[at(j)] += attention[at(j)];
        is_candidate_[at(j)] = true;
      }
    }
    double mass = 0.0;
    for (const Index j : evicted_) {
      const bool is_seen = std::ranges::any_of(seen, [&](Range r) { return r.begin <= j && j < r.end; });
      mass += is_seen ? attention[at(j)] : 0.0;
    }
    largest_row_mass_ = std::max(largest_row_mass_, mass);
  }

  [[nodiscard]] bool is_candidate(Index token) const { return is_candidate_[at(token)]; }

  [[nodiscard]] DecidingLayer layer_of(std::span<const Index> candidates) const {
    DecidingLayer layer;
    layer.text_rows = text_rows_;
    layer.candidates.assign(candidates.begin(), candidates.end());
    for (const Index j : candidates) {
      layer.sums.push_back(sums_[at(j)]);
      layer.evicted.push_back(std::ranges::binary_search(evicted_, j));
    }
    layer.largest_row_mass = largest_row_mass_;
    return layer;
  }

 private:
  std::vector<Index> evicted_;
  std::vector<double> sums_;        ///< [P]
  std::vector<bool> is_candidate_;  ///< [P] whether a text row sees the token
  Index text_rows_ = 0;
  double largest_row_mass_ = 0.0;
};

struct KeepEverything final : LayerDecode {
  Decision step(const Rows& /*row*/, const LayerCache& /*cache*/) override { return {}; }
};

/// Evicts nothing and watches what DAP would see.
class PruningWatch final : public Policy {
 public:
  PruningWatch(const EvictionLog& pruning, const PruningView& view, std::vector<DecidingLayer>& found)
      : pruning_(pruning), view_(view), found_(found) {}

  [[nodiscard]] std::string spec() const override { return "pruning"; }
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> options() const override { return {}; }
  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index layer) const override {
    return {decides(layer) ? PromptRows::text : PromptRows::none};
  }
  [[nodiscard]] std::unique_ptr<Run> begin(const SequenceInfo& info) const override {
    return std::make_unique<State>(*this, info);
  }

 private:
  [[nodiscard]] bool decides(Index layer) const { return layer == 0 || view_.every_layer; }

  [[nodiscard]] std::vector<Index> evicted_in(Index layer) const {
    std::set<Index> tokens;  // a log lists a token once for each lane
    for (const LogEntry& entry : pruning_.entries) {
      if (entry.step == 0 && entry.layer == layer) {
        tokens.insert(entry.token);
      }
    }
    return {tokens.begin(), tokens.end()};
  }

  class State final : public Run {
   public:
    State(const PruningWatch& watch, const SequenceInfo& info) : watch_(watch), info_(info) {}

    void begin_layer(Index layer, const LayerVectors& /*vectors*/) override {
      sums_.reset();
      if (watch_.decides(layer)) {
        sums_.emplace(info_.prompt, watch_.evicted_in(layer));
      }
    }

    void observe(const Rows& rows) override {
      for (Index r = 0; sums_ && r < rows.rows(); ++r) {
        if (!info_.is_visual(rows.query(r))) {
          const Reduction reduction{LaneKind::layer, watch_.view_.heads, Attention::full};
          sums_->add(rows.values(reduction, 0, r), rows.visible(r));
        }
      }
    }

    Decision prune(Index /*layer*/, const LayerCache& /*cache*/) override {
      if (sums_) {
        std::vector<Index> candidates;
        for (Index j = 0; j < info_.prompt; ++j) {
          if (info_.is_visual(j) && sums_->is_candidate(j)) {
            candidates.push_back(j);
          }
        }
        watch_.found_.push_back(sums_->layer_of(candidates));
      }
      return {};
    }

    std::unique_ptr<LayerDecode> decode(Index /*layer*/) override {
      return std::make_unique<KeepEverything>();
    }
    [[nodiscard]] Limits limits(Index /*layer*/, Index /*lane*/) const override { return {}; }

   private:
    const PruningWatch& watch_;
    const SequenceInfo& info_;
    std::optional<PruningSums> sums_;  ///< of the layer in its prefill
  };

  const EvictionLog& pruning_;
  PruningView view_;
  std::vector<DecidingLayer>& found_;
};

/// Why thresholds say nothing, or nothing.
std::string unmet_by(const DecidingLayer& layer) {
  if (layer.text_rows == 0) {
    return "the prompt has no text row";
  }
  return layer.evicted_count() == 0 ? "no token was pruned" : "";
}

/// `|C| · of each`, with the errors of |V| sums, |C| sums and a few products on the way.
Finding strictly_below(const DecidingLayer& layer, double measured, double bound) {
  const auto candidates = static_cast<Index>(layer.candidates.size());
  const double rounding = rounding_of(layer.text_rows + 2 * candidates + 4) * std::max(measured, bound);
  return {unmet_by(layer), Finding::Relation::below, measured, bound, rounding, layer.evicted_count()};
}

}  // namespace

double DecidingLayer::total() const {
  double sum = 0.0;
  for (const double a : sums) {
    sum += a;
  }
  return sum;
}

double DecidingLayer::evicted_sum() const {
  double sum = 0.0;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    sum += evicted[i] ? sums[i] : 0.0;
  }
  return sum;
}

Index DecidingLayer::evicted_count() const {
  return std::count(evicted.begin(), evicted.end(), true);
}

DecidingLayer deciding_layer(View<const double, 2> attention, std::span<const Index> candidates,
                             std::span<const Index> evicted) {
  HAE_EXPECTS(std::ranges::is_sorted(candidates) && std::ranges::includes(candidates, evicted));
  HAE_EXPECTS(candidates.empty() || (candidates.front() >= 0 && candidates.back() < attention.extent(1)));
  PruningSums sums(attention.extent(1), {evicted.begin(), evicted.end()});
  const Range all{0, attention.extent(1)};
  for (Index row = 0; row < attention.extent(0); ++row) {
    sums.add(attention[row].span(), {&all, 1});
  }
  return sums.layer_of(candidates);
}

std::vector<DecidingLayer> deciding_layers(Sequence& sequence, const EvictionLog& pruning,
                                           const PruningView& view, const ReplayOptions& options,
                                           const std::string& where) {
  std::vector<DecidingLayer> found;
  replay(sequence, {std::make_shared<PruningWatch>(pruning, view, found)}, options, where);
  return found;
}

Finding pruned_columns(const DecidingLayer& layer, const PruningThresholds& thresholds) {
  const double each =
      std::min(thresholds.r * layer.total(), thresholds.alpha * static_cast<double>(layer.text_rows));
  return strictly_below(layer, layer.evicted_sum(), static_cast<double>(layer.evicted_count()) * each);
}

Finding pruned_rows(const DecidingLayer& layer, const PruningThresholds& thresholds) {
  Finding finding = strictly_below(layer, layer.largest_row_mass,
                                   static_cast<double>(layer.evicted_count()) * thresholds.alpha);
  finding.cases = layer.text_rows;
  return finding;
}

Finding pruned_share(const DecidingLayer& layer, const PruningThresholds& thresholds, double epsilon,
                     Index most) {
  HAE_EXPECTS(epsilon > 0.0 && most >= 1);
  const double total = layer.total();
  Finding finding = strictly_below(layer, total == 0.0 ? 0.0 : layer.evicted_sum() / total, epsilon);
  if (finding.applies() && layer.evicted_count() > most) {
    finding.unmet = "more than c tokens were pruned";
  }
  if (finding.applies() && thresholds.r > largest_r(epsilon, most)) {
    finding.unmet = "r exceeds ε/c";
  }
  return finding;
}

double largest_r(double epsilon, Index most) {
  HAE_EXPECTS(epsilon > 0.0 && std::isfinite(epsilon));
  HAE_EXPECTS(1 <= most && most <= Index{1} << 53);
  const auto count = static_cast<double>(most);
  const double r = epsilon / count;
  // The sign of a fused multiply-add is that of the exact difference.
  return std::fma(r, count, -epsilon) > 0.0 ? std::nextafter(r, 0.0) : r;
}

Finding mass_guarantee(const DecidingLayer& layer, double eps) {
  HAE_EXPECTS(eps >= 0.0);
  const double total = layer.total();
  Finding finding;
  if (total == 0.0) {
    finding.unmet = "text pays no attention to the visual tokens";
  }
  finding.measured = total == 0.0 ? 0.0 : layer.evicted_sum() / total;
  finding.bound = eps;
  const auto candidates = static_cast<Index>(layer.candidates.size());
  finding.rounding = rounding_of(3 * candidates + 4) * std::max(finding.measured, eps);
  finding.cases = layer.evicted_count();
  return finding;
}

Finding mass_optimal(const DecidingLayer& layer, double eps, Index sinks) {
  HAE_EXPECTS(eps >= 0.0 && sinks >= 0);
  std::vector<double> order;
  for (std::size_t i = 0; i < layer.candidates.size(); ++i) {
    if (layer.candidates[i] >= sinks) {
      order.push_back(layer.sums[i]);
    }
  }
  std::ranges::sort(order);
  // Whoever takes n tokens loses at least the n lowest sums.
  const double allowed = eps * layer.total();
  const double error = rounding_of(3 * static_cast<Index>(layer.candidates.size()) + 4);
  Index possible = 0;
  Index certain = 0;
  double lost = 0.0;
  for (const double sum : order) {
    lost += sum;
    certain += lost * (1.0 + error) <= allowed * (1.0 - error) ? 1 : 0;
    possible += lost * (1.0 - error) <= allowed * (1.0 + error) ? 1 : 0;
  }
  Finding finding;
  if (layer.total() == 0.0) {
    finding.unmet = "text pays no attention to the visual tokens";
  }
  finding.measured = static_cast<double>(possible);
  finding.bound = static_cast<double>(layer.evicted_count());
  finding.rounding = static_cast<double>(possible - certain);
  finding.cases = static_cast<Index>(order.size());
  return finding;
}

}  // namespace hae::analysis
