#include "cuda/plain_attention.hpp"

#include <algorithm>
#include <cmath>

#include "cuda/for_each_index.hpp"

namespace hae::device {
namespace {

constexpr Index kMostDimensions = 256;

/// One row of attention.
struct Row {
  const float* query;
  const float* keys;
  const float* values;
  float* output;
  Index length;
  float scale;

  HAE_HOST_DEVICE Row(const DecodeAttention& attention, Index index, float* outputs) {
    const Index item = index / attention.query_heads;
    const Index head = index % attention.query_heads;
    const Index kv_head = item * attention.kv_heads + head / (attention.query_heads / attention.kv_heads);
    query = attention.queries + index * attention.head_dim;
    keys = attention.keys + kv_head * attention.slots * attention.head_dim;
    values = attention.values + kv_head * attention.slots * attention.head_dim;
    output = outputs + index * attention.head_dim;
    length = attention.lengths[kv_head];
    scale = attention.scales[item];
  }
};

#ifdef HAE_ACCELERATOR

// Written by hand: a warp reads whole keys and values, neighbouring lanes neighbouring numbers, and keeps a
// running maximum, so that K and V are read once and nothing is written but the output. Thrust has no
// algorithm that keeps a row in registers.
constexpr int kWarp = 32;
constexpr int kWarps = 8;  // of a block, which share a row
constexpr int kOfLane = kMostDimensions / kWarp;

__device__ float sum_over_warp(float x) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    x += HAE_SHUFFLE_XOR(x, offset);
  }
  return x;
}

__global__ void attend_rows(DecodeAttention attention, float* outputs) {
  __shared__ float maxima[kWarps];
  __shared__ float sums[kWarps];
  __shared__ float partial[kWarps][kMostDimensions];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const Index head_dim = attention.head_dim;
  for (Index index = blockIdx.x; index < attention.items * attention.query_heads; index += gridDim.x) {
    const Row row(attention, index, outputs);
    float q[kOfLane];
    float o[kOfLane] = {};
    for (int i = 0; i < kOfLane; ++i) {
      q[i] = lane + i * kWarp < head_dim ? row.query[lane + i * kWarp] * row.scale : 0.0f;
    }
    float largest = -INFINITY;
    float sum = 0.0f;
    for (Index slot = warp; slot < row.length; slot += kWarps) {
      float z = 0.0f;
      for (int i = 0; i < kOfLane && lane + i * kWarp < head_dim; ++i) {
        z += q[i] * row.keys[slot * head_dim + lane + i * kWarp];
      }
      z = sum_over_warp(z);
      const float now = fmaxf(largest, z);
      const float shrink = __expf(largest - now);
      const float weight = __expf(z - now);
      sum = sum * shrink + weight;
      for (int i = 0; i < kOfLane && lane + i * kWarp < head_dim; ++i) {
        o[i] = o[i] * shrink + weight * row.values[slot * head_dim + lane + i * kWarp];
      }
      largest = now;
    }
    maxima[warp] = largest;
    sums[warp] = sum;
    for (int i = 0; i < kOfLane; ++i) {
      partial[warp][lane + i * kWarp] = o[i];
    }
    __syncthreads();
    float top = maxima[0];
    for (int w = 1; w < kWarps; ++w) {
      top = fmaxf(top, maxima[w]);
    }
    for (Index d = threadIdx.x; d < head_dim; d += blockDim.x) {
      float weighted = 0.0f;
      float total = 0.0f;
      for (int w = 0; w < kWarps; ++w) {
        const float share = maxima[w] == -INFINITY ? 0.0f : __expf(maxima[w] - top);
        weighted += share * partial[w][d];
        total += share * sums[w];
      }
      row.output[d] = total == 0.0f ? 0.0f : weighted / total;
    }
    __syncthreads();  // before the next row's maxima
  }
}

#else

struct AttendRow {
  DecodeAttention attention;
  float* outputs;

  void operator()(Index index) const {
    const Row row(attention, index, outputs);
    float largest = -INFINITY;
    float total = 0.0f;
    std::fill_n(row.output, attention.head_dim, 0.0f);
    for (Index slot = 0; slot < row.length; ++slot) {
      float z = 0.0f;
      for (Index d = 0; d < attention.head_dim; ++d) {
        z += row.query[d] * row.keys[slot * attention.head_dim + d];
      }
      const float now = std::max(largest, z * row.scale);
      const float shrink = std::exp(largest - now);
      const float weight = std::exp(z * row.scale - now);
      total = total * shrink + weight;
      for (Index d = 0; d < attention.head_dim; ++d) {
        row.output[d] = row.output[d] * shrink + weight * row.values[slot * attention.head_dim + d];
      }
      largest = now;
    }
    for (Index d = 0; d < attention.head_dim && total > 0.0f; ++d) {
      row.output[d] /= total;
    }
  }
};

#endif

}  // namespace

void attend_plainly(const DecodeAttention& attention, float* outputs, Stream stream) {
  HAE_EXPECTS(attention.head_dim <= kMostDimensions);
  const Index rows = attention.items * attention.query_heads;
#ifdef HAE_ACCELERATOR
  if (rows > 0) {
    const auto blocks = static_cast<unsigned>(std::min<Index>(rows, Index{1} << 20));  // the kernel loops
    attend_rows<<<blocks, kWarp * kWarps, 0, static_cast<HAE_GPU(Stream_t)>(stream)>>>(attention, outputs);
    check_launch("plain attention");
  }
#else
  for_each_index("plain attention", stream, rows, AttendRow{attention, outputs});
#endif
}

}  // namespace hae::device
