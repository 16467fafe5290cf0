#include "reference/similar_keys.hpp"

#include <cmath>

namespace hae::reference {

double dot(std::span<const float> x, std::span<const float> y) {
  double sum = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    sum += static_cast<double>(x[i]) * static_cast<double>(y[i]);
  }
  return sum;
}

double norm(std::span<const float> x) {
  return std::sqrt(dot(x, x));
}

std::vector<Neighbour> most_similar(const View<const float, 2>& keys, std::span<const Index> tokens,
                                    std::span<const Index> among) {
  HAE_EXPECTS(!among.empty());
  std::vector<double> norms;
  for (const Index other : among) {
    norms.push_back(norm(keys[other].span()));
  }
  std::vector<Neighbour> found;
  for (const Index token : tokens) {
    const double own = norm(keys[token].span());
    Neighbour best{-1, 0.0};
    for (std::size_t i = 0; i < among.size(); ++i) {
      const double lengths = own * norms[i];
      const double cosine = lengths > 0.0 ? dot(keys[token].span(), keys[among[i]].span()) / lengths : 0.0;
      if (best.token < 0 || cosine >= best.cosine) {
        best = {among[i], cosine};
      }
    }
    found.push_back(best);
  }
  return found;
}

}  // namespace hae::reference
