#include "cuda/token_scores.hpp"

#include "cuda/for_each_index.hpp"

namespace hae::device {
namespace {

/// One number of one row of values.
///
/// heads  [first_head, first_head + count): the lane's
HAE_HOST_DEVICE double value_of(const RowBlock& block, const RowValues& values, Index item, Index first_head,
                                Index count, Index row, Index key) {
  double value = 0.0;
  for (Index head = first_head; head < first_head + count; ++head) {
    const Index row_of_heads = (item * block.query_heads + head) * block.rows + row;
    const float divisor = values.divisors[row_of_heads];
    if (divisor == 0.0f) {
      continue;  // A head without mass counts as zeros; the mean still divides by all heads.
    }
    if (values.resident != nullptr) {
      const Index lane = head / (block.query_heads / values.resident_lanes);
      if (values.resident[(item * values.resident_lanes + lane) * values.stride + key] == 0) {
        continue;
      }
    }
    const double a = static_cast<double>(block.weights[row_of_heads * block.keys + key] / divisor);
    if (values.heads == HeadReduction::max) {
      value = a > value ? a : value;
    } else {
      value += a;
    }
  }
  return values.heads == HeadReduction::mean ? value / static_cast<double>(count) : value;
}

struct AddRows {
  RowBlock block;
  RowValues values;
  Index lanes;
  double* scores;
  Index* exposures;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index key = take_axis(index, block.keys);
    const Index lane = take_axis(index, lanes);
    const Index item = index;
    const Index heads = block.query_heads / lanes;
    double& score = scores[(item * lanes + lane) * values.stride + key];
    double sum = score;
    Index seen = 0;
    for (Index row = block.active.begin; row < block.active.end; ++row) {
      const Index query = block.queries[item * block.rows + row];
      if (query < 0) {
        continue;
      }
      sum += value_of(block, values, item, lane * heads, heads, row, key);
      if (lane == 0 && exposures != nullptr && block.masks[item].sees(query, key)) {
        ++seen;
      }
    }
    score = sum;
    if (lane == 0 && exposures != nullptr) {
      exposures[item * values.stride + key] += seen;
    }
  }
};

struct AddTextRows {
  RowBlock block;
  RowValues values;
  double* sums;
  double* largest;
  std::uint8_t* seen;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index key = take_axis(index, block.keys);
    const Index item = index;
    const Index out = item * values.stride + key;
    double sum = sums[out];
    double most = largest[out];
    for (Index row = block.active.begin; row < block.active.end; ++row) {
      const Index query = block.queries[item * block.rows + row];
      if (query < 0 || !block.masks[item].sees(query, key)) {
        continue;
      }
      const double a = value_of(block, values, item, 0, block.query_heads, row, key);
      sum += a;
      most = a > most ? a : most;
      seen[out] = 1;
    }
    sums[out] = sum;
    largest[out] = most;
  }
};

struct DivideByExposures {
  const double* scores;
  const Index* exposures;
  Index lanes, stride;
  double* ranking;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index place = index;
    const Index key = take_axis(index, stride);
    const Index seen = exposures[index / lanes * stride + key];
    ranking[place] = seen == 0 ? 0.0 : scores[place] / static_cast<double>(seen);
  }
};

}  // namespace

void add_rows(const RowBlock& block, const RowValues& values, Index lanes, double* scores, Index* exposures,
              Stream stream) {
  HAE_EXPECTS(block.query_heads % lanes == 0 && block.keys <= values.stride);
  for_each_index("adding to scores", stream, block.items * lanes * block.keys,
                 AddRows{block, values, lanes, scores, exposures});
}

void add_text_rows(const RowBlock& block, const RowValues& values, double* sums, double* largest,
                   std::uint8_t* seen, Stream stream) {
  HAE_EXPECTS(block.keys <= values.stride);
  for_each_index("adding the rows of text", stream, block.items * block.keys,
                 AddTextRows{block, values, sums, largest, seen});
}

void divide_by_exposures(const double* scores, const Index* exposures, Index items, Index lanes, Index stride,
                         double* ranking, Stream stream) {
  for_each_index("dividing scores", stream, items * lanes * stride,
                 DivideByExposures{scores, exposures, lanes, stride, ranking});
}

}  // namespace hae::device
