#include "analysis/foregone_attention.hpp"

#include <algorithm>
#include <string>

#include "analysis/decay_envelope.hpp"

namespace hae::analysis {
namespace {

void raise(double& largest, double x) {
  largest = std::max(largest, x);
}

void raise_all(std::vector<double>& largest, const std::vector<double>& other) {
  largest.resize(std::max(largest.size(), other.size()), 0.0);
  for (std::size_t i = 0; i < other.size(); ++i) {
    raise(largest[i], other[i]);
  }
}

/// The finding of one comparison, unless the decay does not bound what was observed.
Finding compared(const std::string& unmet, double measured, double bound, Index additions, Index cases) {
  return {.unmet = unmet,
          .measured = measured,
          .bound = bound,
          .rounding = measured * rounding_of(additions),
          .cases = cases};
}

}  // namespace

ForegoneAttention& ForegoneAttention::operator+=(const ForegoneAttention& other) {
  evictions += other.evictions;
  flushes += other.flushes;
  raise_all(largest, other.largest);
  raise_all(largest_sum, other.largest_sum);
  for (const auto& [key, sum] : other.by_flush) {
    raise(by_flush[key], sum);
  }
  for (const auto& [tokens, sum] : other.by_future) {
    raise(by_future[tokens], sum);
  }
  return *this;
}

/// One layer: the tokens that have left, by the flush they left in.
class ForegoneAttentionVisitor::Layer {
 public:
  void evict(Index step, std::span<const LogEntry> evicted) {
    for (const LogEntry& entry : evicted) {
      const Index lane = std::max<Index>(entry.lane, 0);
      if (flushes_.empty() || flushes_.back().step != step || flushes_.back().lane != lane) {
        flushes_.push_back({step, lane, {}, 0.0});
      }
      flushes_.back().tokens.push_back({entry.token, 0.0});
    }
  }

  /// Adds a row of a lane.
  void observe(Index step, Index lane, std::span<const double> attention) {
    for (Flush& flush : flushes_) {
      if (flush.lane != lane) {
        continue;
      }
      const Index age = step - flush.step;
      double sum = 0.0;
      for (Gone& gone : flush.tokens) {
        const double a = attention[at(gone.token)];
        gone.received += a;
        sum += a;
        raise(found_.largest[at(age - 1)], a);
        raise(found_.largest_sum[at(age - 1)], gone.received);
      }
      flush.received += sum;
      raise(found_.by_flush[{std::ssize(flush.tokens), age}], sum);
    }
  }

  void begin(Index steps) {
    found_.largest.assign(at(steps), 0.0);
    found_.largest_sum.assign(at(steps), 0.0);
  }

  /// A token that left after the last step has nothing to receive.
  ForegoneAttention finish() {
    for (const Flush& flush : flushes_) {
      found_.evictions += std::ssize(flush.tokens);
      ++found_.flushes;
      raise(found_.by_future[std::ssize(flush.tokens)], flush.received);
    }
    flushes_.clear();
    return std::move(found_);
  }

 private:
  struct Gone {
    Index token;
    double received;
  };
  struct Flush {
    Index step;
    Index lane;
    std::vector<Gone> tokens;
    double received;
  };

  std::vector<Flush> flushes_;
  ForegoneAttention found_;
};

ForegoneAttentionVisitor::ForegoneAttentionVisitor(const SequenceInfo& info, LaneKind lanes)
    : info_(info), lanes_(lanes), layers_(at(info.layers)) {}

ForegoneAttentionVisitor::~ForegoneAttentionVisitor() = default;

void ForegoneAttentionVisitor::begin_layer(Index layer, std::span<const LogEntry> evicted) {
  layers_[at(layer)].begin(info_.steps());
  layers_[at(layer)].evict(0, evicted);
}

void ForegoneAttentionVisitor::row(const DecodeRow& row) {
  Layer& layer = layers_[at(row.layer)];
  const Rows rows(row.block, {row.row}, row.cache.keep_by_lane());
  const Reduction reduction{lanes_, HeadReduction::mean, Attention::full};
  for (Index lane = 0; lane < row.cache.lanes(); ++lane) {
    layer.observe(row.step, lane, rows.values(reduction, lane, 0));
  }
  layer.evict(row.step, row.evicted);
}

std::vector<ForegoneAttention> ForegoneAttentionVisitor::take() {
  std::vector<ForegoneAttention> found;
  for (Layer& layer : layers_) {
    found.push_back(layer.finish());
  }
  return found;
}

DecayFindings decay_findings(const Decay& decay, const ForegoneAttention& observed) {
  std::string unmet;
  if (const std::optional<Excess> excess = excess_over(decay, observed.largest)) {
    unmet = "an evicted token received more than the decay allows at age " + std::to_string(excess->age);
  } else if (observed.evictions == 0) {
    unmet = "nothing was evicted";
  }
  const Finding nothing{.unmet = unmet};
  DecayFindings findings{nothing, nothing, nothing};
  const auto nearest = [](Finding& worst, const Finding& finding) {
    const auto room = [](const Finding& f) { return f.slack() + f.rounding; };
    worst = worst.cases == 0 || room(finding) < room(worst) ? finding : worst;
  };
  for (Index k = 1; k <= std::ssize(observed.largest_sum); ++k) {
    const double sum = observed.largest_sum[at(k - 1)];
    nearest(findings.summed_loss, compared(unmet, sum, summed_loss_bound(decay, k), k, observed.evictions));
  }
  for (const auto& [flush, sum] : observed.by_flush) {
    const auto& [tokens, age] = flush;
    nearest(findings.flush_loss,
            compared(unmet, sum, flush_loss_bound(decay, tokens, age), tokens, observed.flushes));
  }
  for (const auto& [tokens, sum] : observed.by_future) {
    const Index additions = tokens + std::ssize(observed.largest);
    nearest(findings.future_loss,
            compared(unmet, sum, future_loss_bound(decay, tokens, 0), additions, observed.flushes));
  }
  return findings;
}

}  // namespace hae::analysis
