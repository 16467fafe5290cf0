#include "cuda/pooled_scores.hpp"

#include "cuda/for_each_index.hpp"

namespace hae::device {
namespace {

struct Pool {
  const double* sums;
  Index query_heads, kv_heads, stride;
  const Index* counts;
  Pooling pooling;
  double* scores;

  [[nodiscard]] HAE_HOST_DEVICE double of_rows(double sum) const {
    return pooling.rows == 1.0 ? sum : sum / pooling.rows;
  }

  [[nodiscard]] HAE_HOST_DEVICE double pooled(const double* row, Index token, Index count) const {
    if (token >= count) {
      return of_rows(row[token]);
    }
    const Index half = pooling.kernel / 2;
    const Index begin = token > half ? token - half : 0;
    const Index end = token + half + 1 < count ? token + half + 1 : count;
    double sum = 0.0;
    double largest = of_rows(row[begin]);
    for (Index j = begin; j < end; ++j) {
      const double value = of_rows(row[j]);
      sum += value;
      largest = value > largest ? value : largest;
    }
    return pooling.takes_maximum ? largest : sum / static_cast<double>(pooling.kernel);
  }

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index out = index;
    const Index token = take_axis(index, stride);
    const Index item = index / kv_heads;
    const Index heads = query_heads / kv_heads;
    const Index first_head = item * query_heads + index % kv_heads * heads;
    double reduced = 0.0;
    for (Index head = first_head; head < first_head + heads; ++head) {
      const double value = pooled(sums + head * stride, token, counts[item]);
      if (pooling.group == HeadReduction::max) {
        reduced = value > reduced ? value : reduced;
      } else {
        reduced += value;
      }
    }
    scores[out] = pooling.group == HeadReduction::mean ? reduced / static_cast<double>(heads) : reduced;
  }
};

}  // namespace

void pool_scores(const double* sums, Index items, Index query_heads, Index kv_heads, Index stride,
                 const Index* counts, const Pooling& pooling, double* scores, Stream stream) {
  HAE_EXPECTS(pooling.kernel >= 1 && pooling.kernel % 2 == 1);
  for_each_index("pooling scores", stream, items * kv_heads * stride,
                 Pool{sums, query_heads, kv_heads, stride, counts, pooling, scores});
}

}  // namespace hae::device
