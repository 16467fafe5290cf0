#include "sim/rows.hpp"

#include "sim/row_kernels.hpp"

namespace hae {

Rows::Rows(const WeightBlock& block, std::vector<Index> rows, std::vector<std::span<const float>> keep)
    : block_(block), rows_(std::move(rows)), keep_(std::move(keep)) {
  HAE_EXPECTS(keep_.size() == 1 || static_cast<Index>(keep_.size()) == block.kv_heads);
}

const float* Rows::keep_of_head(Index head) const {
  const Index lane = keep_.size() == 1 ? 0 : head / (block_.query_heads / block_.kv_heads);
  return keep_[static_cast<std::size_t>(lane)].data();
}

float Rows::resident_sum(Index head, Index row) const {
  if (resident_sums_.empty()) {
    resident_sums_.resize(static_cast<std::size_t>(block_.query_heads * rows()));
    for (Index h = 0; h < block_.query_heads; ++h) {
      for (Index r = 0; r < rows(); ++r) {
        const float* weights = block_.row(h, static_cast<Index>(block_row(r)));
        resident_sums_[static_cast<std::size_t>(h * rows() + r)] =
            kernels::sum_kept(weights, keep_of_head(h), block_.stride);
      }
    }
  }
  return resident_sums_[static_cast<std::size_t>(head * rows() + row)];
}

void Rows::reduce(const Reduction& reduction, std::vector<double>& out) const {
  const Index lanes = reduction.lanes == LaneKind::layer ? 1 : block_.kv_heads;
  const Index heads = block_.query_heads / lanes;
  const std::vector<float> everything(
      reduction.attention == Attention::full ? static_cast<std::size_t>(block_.stride) : 0, 1.0f);
  out.assign(static_cast<std::size_t>(lanes * rows() * block_.stride), 0.0);
  for (Index lane = 0; lane < lanes; ++lane) {
    for (Index r = 0; r < rows(); ++r) {
      double* total = out.data() + (lane * rows() + r) * block_.stride;
      const Index row = static_cast<Index>(block_row(r));
      for (Index h = lane * heads; h < (lane + 1) * heads; ++h) {
        const bool full = reduction.attention == Attention::full;
        const float divisor = full ? block_.sum(h, row) : resident_sum(h, r);
        if (divisor == 0.0f) {
          continue;  // A head without mass counts as zeros; the mean still divides by all heads.
        }
        const float* keep = full ? everything.data() : keep_of_head(h);
        const auto fold =
            reduction.heads == HeadReduction::max ? kernels::max_normalised : kernels::add_normalised;
        fold(block_.row(h, row), keep, divisor, total, block_.stride);
      }
      if (reduction.heads == HeadReduction::mean) {
        kernels::divide(total, static_cast<double>(heads), block_.stride);
      }
    }
  }
}

std::span<const double> Rows::values(const Reduction& reduction, Index lane, Index row) const {
  HAE_EXPECTS(row >= 0 && row < rows() && lane >= 0);
  HAE_EXPECTS(lane < (reduction.lanes == LaneKind::layer ? 1 : block_.kv_heads));
  const auto [entry, is_new] = values_.try_emplace(reduction);
  if (is_new) {
    reduce(reduction, entry->second);
  }
  return {entry->second.data() + (lane * rows() + row) * block_.stride,
          static_cast<std::size_t>(block_.stride)};
}

}  // namespace hae
