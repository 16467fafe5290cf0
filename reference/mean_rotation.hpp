#pragma once

#include <vector>

#include "sim/trace.hpp"

namespace hae::reference {

/// Cosine and sine.
struct Turn {
  double cosine = 1.0;
  double sine = 0.0;
};

/// Cosine and sine of an angle in radians, in double, from additions and multiplications alone: libm's bits
/// differ between machines, and a score decides evictions. Within 2^-48 for |angle| up to 2^20.
Turn turn_of(double angle);

/// [head_dim / 2] What the rotary embedding does to each pair of dimensions, on average over the positions
/// [begin, begin + count): the mean of its rotation matrices.
std::vector<Turn> mean_rotation(const Rotary& rotary, Index begin, Index count);

/// vector, turned back by the transposed matrices.
///
/// vector  [head_dim]
std::vector<double> turned_back(const View<const float, 1>& vector, const std::vector<Turn>& turns,
                                bool interleaved);

}  // namespace hae::reference
