#include "reference/head_sums.hpp"

#include <algorithm>

#include "sim/row_kernels.hpp"

namespace hae::reference {

HeadSums::HeadSums(const SequenceInfo& info, Index newest)
    : first_query_(info.prompt - std::min(newest, info.prompt)),
      sums_(at(info.query_heads), std::vector<double>(at(kernels::padded(info.prompt)), 0.0)) {}

void HeadSums::observe(const Rows& rows) {
  for (Index r = 0; r < rows.rows(); ++r) {
    if (rows.query(r) < first_query_) {
      continue;
    }
    for (std::size_t head = 0; head < sums_.size(); ++head) {
      const std::span<const double> row = rows.head(Attention::observed, static_cast<Index>(head), r);
      kernels::add(row.data(), sums_[head].data(), static_cast<Index>(row.size()));
    }
  }
}

TokenScores reduce_groups(const TokenScores& by_head, const SequenceInfo& info, HeadReduction group) {
  TokenScores lanes;
  for (Index lane = 0; lane < info.kv_heads; ++lane) {
    const auto first = by_head.begin() + lane * info.group_heads();
    std::vector<double>& reduced = lanes.emplace_back(first->size(), 0.0);
    for (auto head = first; head != first + info.group_heads(); ++head) {
      for (std::size_t j = 0; j < reduced.size(); ++j) {
        reduced[j] = group == HeadReduction::max ? std::max(reduced[j], (*head)[j]) : reduced[j] + (*head)[j];
      }
    }
    if (group == HeadReduction::mean) {
      kernels::divide(reduced.data(), static_cast<double>(info.group_heads()), std::ssize(reduced));
    }
  }
  return lanes;
}

void pool_neighbours(TokenScores& scores, Index count, Index kernel, Pool pool) {
  HAE_EXPECTS(kernel >= 1 && kernel % 2 == 1);
  for (std::vector<double>& row : scores) {
    const std::vector<double> before = row;
    for (Index j = 0; j < count; ++j) {
      const auto begin = before.begin() + std::max<Index>(0, j - kernel / 2);
      const auto end = before.begin() + std::min(count, j + kernel / 2 + 1);
      double sum = 0.0;
      std::for_each(begin, end, [&](double neighbour) { sum += neighbour; });
      row[at(j)] = pool == Pool::max ? *std::max_element(begin, end) : sum / static_cast<double>(kernel);
    }
  }
}

}  // namespace hae::reference
