#include "sim/rows.hpp"

#include "sim/row_kernels.hpp"

namespace hae {

std::vector<Range> neighbours(std::span<const Index> positions, Index most) {
  std::vector<Range> ranges;
  for (Index i = 0; i < std::ssize(positions); ++i) {
    const bool joins =
        !ranges.empty() && ranges.back().size() < most && positions[at(i)] == positions[at(i - 1)] + 1;
    if (joins) {
      ++ranges.back().end;
    } else {
      ranges.push_back({i, i + 1});
    }
  }
  return ranges;
}

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

/// Adds a head's normalised row to `total`, or takes the larger of both.
void Rows::add_head(Attention attention, HeadReduction heads, Index query_head, Index row,
                    double* total) const {
  const bool full = attention == Attention::full;
  const Index of_block = static_cast<Index>(block_row(row));
  const float divisor = full ? block_.sum(query_head, of_block) : resident_sum(query_head, row);
  if (divisor == 0.0f) {
    return;  // A head without mass counts as zeros; the mean still divides by all heads.
  }
  if (full && everything_.empty()) {
    everything_.assign(at(block_.stride), 1.0f);
  }
  const float* keep = full ? everything_.data() : keep_of_head(query_head);
  const auto fold = heads == HeadReduction::max ? kernels::max_normalised : kernels::add_normalised;
  fold(block_.row(query_head, of_block), keep, divisor, total, block_.stride);
}

void Rows::reduce(const Reduction& reduction, std::vector<double>& out) const {
  const Index lanes = reduction.lanes == LaneKind::layer ? 1 : block_.kv_heads;
  const Index heads = block_.query_heads / lanes;
  out.assign(static_cast<std::size_t>(lanes * rows() * block_.stride), 0.0);
  for (Index lane = 0; lane < lanes; ++lane) {
    for (Index r = 0; r < rows(); ++r) {
      double* total = out.data() + (lane * rows() + r) * block_.stride;
      for (Index h = lane * heads; h < (lane + 1) * heads; ++h) {
        add_head(reduction.attention, reduction.heads, h, r, total);
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

std::span<const double> Rows::head(Attention attention, Index query_head, Index row) const {
  HAE_EXPECTS(row >= 0 && row < rows() && query_head >= 0 && query_head < block_.query_heads);
  const auto [entry, is_new] = heads_.try_emplace(attention);
  if (is_new) {
    entry->second.assign(at(block_.query_heads * rows() * block_.stride), 0.0);
    for (Index h = 0; h < block_.query_heads; ++h) {
      for (Index r = 0; r < rows(); ++r) {
        double* out = entry->second.data() + (h * rows() + r) * block_.stride;
        add_head(attention, HeadReduction::sum, h, r, out);
      }
    }
  }
  return {entry->second.data() + (query_head * rows() + row) * block_.stride, at(block_.stride)};
}

}  // namespace hae
