#pragma once

#include <span>
#include <vector>

#include "sim/view.hpp"

namespace hae::reference {

/// Σ x_i y_i in double, dimensions ascending.
double dot(std::span<const float> x, std::span<const float> y);

/// ‖x‖₂ in double, dimensions ascending.
double norm(std::span<const float> x);

/// A token, and the cosine of its key with another one's.
struct Neighbour {
  Index token = 0;
  double cosine = 0.0;
};

/// For each of `tokens` the one of `among` whose key has the highest cosine with its own; of equal ones the
/// newest. A cosine with a zero vector is 0.
///
/// keys   [T, head_dim]
/// among  ascending, not empty
std::vector<Neighbour> most_similar(const View<const float, 2>& keys, std::span<const Index> tokens,
                                    std::span<const Index> among);

}  // namespace hae::reference
