#include <algorithm>
#include <cmath>

#include "reference/head_sums.hpp"
#include "reference/mean_rotation.hpp"
#include "reference/policies.hpp"
#include "reference/prompt_selection.hpp"
#include "reference/similar_keys.hpp"
#include "sim/arithmetic.hpp"

namespace hae::reference {
namespace {

struct ExpectedOptions {
  Index sinks;
  Index future;
  double epsilon;
};

/// Mean and covariance of a head's queries before rotary embedding, the sinks' left out.
struct QueryMoments {
  std::vector<double> mean;        ///< [head_dim]
  std::vector<double> covariance;  ///< [head_dim, head_dim], divided by the number of queries
};

/// queries  [P, head_dim]; rows ascending, in double
QueryMoments moments_of(const View<const float, 2>& queries, Index sinks) {
  const Index head_dim = queries.extent(1);
  const auto count = static_cast<double>(queries.extent(0) - sinks);
  QueryMoments moments{std::vector<double>(at(head_dim), 0.0),
                       std::vector<double>(at(head_dim * head_dim), 0.0)};
  for (Index q = sinks; q < queries.extent(0); ++q) {
    for (Index i = 0; i < head_dim; ++i) {
      moments.mean[at(i)] += static_cast<double>(queries[q][i]) / count;
    }
  }
  std::vector<double> centred(at(head_dim));
  for (Index q = sinks; q < queries.extent(0); ++q) {
    for (Index i = 0; i < head_dim; ++i) {
      centred[at(i)] = static_cast<double>(queries[q][i]) - moments.mean[at(i)];
    }
    for (Index i = 0; i < head_dim; ++i) {
      for (Index j = 0; j < head_dim; ++j) {
        moments.covariance[at(i * head_dim + j)] += centred[at(i)] * centred[at(j)] / count;
      }
    }
  }
  return moments;
}

/// z = k·R̄μ/√d + kᵀ R̄ΣR̄ᵀ k/(2d), with k turned back by R̄ᵀ already.
double expected_logit(const std::vector<double>& key, const QueryMoments& moments) {
  const std::size_t head_dim = key.size();
  double linear = 0.0;
  double quadratic = 0.0;
  for (std::size_t i = 0; i < head_dim; ++i) {
    linear += key[i] * moments.mean[i];
    double row = 0.0;
    for (std::size_t j = 0; j < head_dim; ++j) {
      row += moments.covariance[i * head_dim + j] * key[j];
    }
    quadratic += key[i] * row;
  }
  const auto d = static_cast<double>(head_dim);
  return linear / std::sqrt(d) + quadratic / (2.0 * d);
}

/// Softmax from `begin` on: weights by exp_nonpositive, their sum in double, ascending.
void softmax(std::vector<double>& logits, Index begin) {
  const double largest = *std::max_element(logits.begin() + begin, logits.end());
  double sum = 0.0;
  std::for_each(logits.begin() + begin, logits.end(), [&](double& z) {
    z = static_cast<double>(arithmetic::exp_nonpositive(static_cast<float>(z - largest)));
    sum += z;
  });
  std::for_each(logits.begin() + begin, logits.end(), [&](double& p) { p /= sum; });
}

class Scorer final : public PromptScorer {
 public:
  Scorer(const SequenceInfo& info, const LayerVectors& vectors, const ExpectedOptions& options)
      : info_(info), vectors_(vectors), options_(options) {}

  [[nodiscard]] TokenScores scores() const override {
    const std::vector<Turn> turns = mean_rotation(*info_.rotary, info_.prompt, options_.future);
    TokenScores by_head;
    for (Index head = 0; head < info_.query_heads; ++head) {
      std::vector<double>& logits = by_head.emplace_back(at(info_.prompt), 0.0);
      if (info_.prompt <= options_.sinks) {
        continue;  // Sinks alone: nothing is ranked.
      }
      const QueryMoments moments = moments_of(vectors_.unrotated_queries[head], options_.sinks);
      const View<const float, 2> keys = vectors_.keys[head / info_.group_heads()];
      for (Index j = options_.sinks; j < info_.prompt; ++j) {
        logits[at(j)] = expected_logit(turned_back(keys[j], turns, info_.rotary->interleaved), moments);
      }
      softmax(logits, options_.sinks);
    }
    TokenScores lanes = reduce_groups(by_head, info_, HeadReduction::mean);
    for (Index lane = 0; lane < info_.kv_heads; ++lane) {
      for (Index j = 0; j < info_.prompt; ++j) {
        double& score = lanes[at(lane)][at(j)];
        score = (score + options_.epsilon) * norm(vectors_.values[lane][j].span());
      }
    }
    return lanes;
  }

 private:
  const SequenceInfo& info_;
  LayerVectors vectors_;
  ExpectedOptions options_;
};

class ExpectedAttention final : public PromptSelection {
 public:
  ExpectedAttention(Options options, Rebuild rebuild, const ExpectedOptions& expected)
      : PromptSelection(std::move(options), rebuild, 0, expected.sinks), expected_(expected) {}

  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override {
    return {.keys = true, .values = true, .unrotated_queries = true};
  }
  [[nodiscard]] std::unique_ptr<PromptScorer> scorer(const SequenceInfo& info,
                                                     const LayerVectors& vectors) const override {
    return std::make_unique<Scorer>(info, vectors, expected_);
  }

 private:
  ExpectedOptions expected_;
};

constexpr std::array kOptions = {
    kRequiredBudgetOption,
    OptionInfo{"sinks", "4", "a count of 0 or more",
               "first tokens, which stay and whose queries do not count"},
    OptionInfo{"future", "512", "a count of 1 or more", "positions after the prompt to expect queries at"},
    OptionInfo{"epsilon", "0", "a number of 0 or more", "added to the expected attention"},
};

std::shared_ptr<const Policy> make(Options options) {
  const ExpectedOptions expected{options.count("sinks", 0), options.count("future", 1),
                                 options.threshold("epsilon")};
  return std::make_shared<ExpectedAttention>(std::move(options), make, expected);
}

}  // namespace

const PolicyInfo kExpectedAttention = {
    "expected-attention",
    "keeps what queries like those of the prompt would look at from later positions",
    "Expected Attention, arXiv 2510.00636; NVIDIA/kvpress expected_attention_press.py",
    "Prefill only: decoding evicts nothing. Exact but for ties and rounding: Gaussian moments of the queries "
    "before rotary embedding, turned by the mean rotation of the positions to come; softmax over the tokens "
    "after the sinks, the mean of the group, times the length of the value. Expected probabilities below "
    "2^-149 of the largest count as 0. Needs queries before rotary embedding (hae record --unrotated), keys "
    "and values; no attention.",
    kOptions,
    make};

}  // namespace hae::reference
