// Compiles the canonical arithmetic for a device; tests/sim/CMakeLists.txt runs nvcc on it.

#include "sim/arithmetic.hpp"

__global__ void weights_of_row(const float* query, const float* keys, long long head_dim, float scale,
                               float maximum, float* weights) {
  float partial[hae::arithmetic::kPartials] = {};
  const int key = static_cast<int>(threadIdx.x);
  const float z = hae::arithmetic::logit(query, keys + key * head_dim, head_dim, scale);
  weights[key] = hae::arithmetic::exp_nonpositive(z - maximum);
  partial[key % hae::arithmetic::kPartials] += weights[key];
  weights[0] = hae::arithmetic::fold(partial);
}
