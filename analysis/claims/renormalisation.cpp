#include "analysis/claims/renormalisation.hpp"

#include <algorithm>
#include <cmath>
#include <string>
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
Finding inapplicable(const std::string& unmet) {
  Finding finding;
  finding.unmet = unmet;
  finding.cases = 1;
  return finding;
}

}  // namespace

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
