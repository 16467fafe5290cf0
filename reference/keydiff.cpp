#include <cmath>

#include "reference/key_scores.hpp"
#include "reference/policies.hpp"
#include "reference/similar_keys.hpp"

namespace hae::reference {
namespace {

/// -cos(k_j, mean_i k_i/‖k_i‖), where a cosine with a zero vector is 0.
std::vector<double> minus_cosines(const View<const float, 2>& keys, Index tokens) {
  const Index head_dim = keys.extent(1);
  std::vector<double> anchor(at(head_dim), 0.0);
  for (Index j = 0; j < tokens; ++j) {
    const double length = norm(keys[j].span());
    for (Index i = 0; i < head_dim; ++i) {
      anchor[at(i)] += length > 0.0 ? static_cast<double>(keys[j][i]) / length : 0.0;
    }
  }
  double anchor_squares = 0.0;
  for (double& x : anchor) {
    x /= static_cast<double>(tokens);
    anchor_squares += x * x;
  }
  std::vector<double> scores;
  for (Index j = 0; j < tokens; ++j) {
    double product = 0.0;
    for (Index i = 0; i < head_dim; ++i) {
      product += static_cast<double>(keys[j][i]) * anchor[at(i)];
    }
    const double lengths = norm(keys[j].span()) * std::sqrt(anchor_squares);
    scores.push_back(lengths > 0.0 ? -(product / lengths) : 0.0);
  }
  return scores;
}

constexpr std::array kOptions = {kRequiredBudgetOption};

std::shared_ptr<const Policy> make(Options options) {
  return std::make_shared<KeySelection>(std::move(options), make, minus_cosines);
}

}  // namespace

const PolicyInfo kKeydiff = {
    "keydiff",
    "keeps the keys least like the mean key",
    "KeyDiff, arXiv 2504.15364; NVIDIA/kvpress keydiff_press.py",
    "Prefill only: decoding evicts nothing, and the prompt is scored as a whole, as kvpress does; the paper "
    "works block by block. Exact but for ties and rounding in float32. Needs keys, no attention.",
    kOptions,
    make};

}  // namespace hae::reference
