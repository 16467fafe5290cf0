#include "sim/row_meter.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>

#include "sim/row_kernels.hpp"

namespace hae {
namespace {

constexpr double kAbsent = std::numeric_limits<double>::quiet_NaN();

/// Weights are not negative, so they order like their bits; the upper ones tell exponents and eighths apart.
constexpr int kLowerBits = 20;
constexpr std::size_t kBins = std::size_t{1} << (31 - kLowerBits);

std::size_t bin_of(float weight) {
  return std::bit_cast<std::uint32_t>(weight) >> kLowerBits & (kBins - 1);  // without the sign of -0
}

double norm(std::span<const double> vector) {
  double squares = 0.0;
  for (const double x : vector) {
    squares += x * x;
  }
  return std::sqrt(squares);
}

}  // namespace

RowMeter::RowMeter(const SequenceInfo& info, View<const float, 3> values)
    : info_(info), values_(values), measured_(static_cast<std::size_t>(info.query_heads)) {
  HAE_EXPECTS(values.empty() || (values.extent(0) == info.kv_heads && values.extent(1) == info.tokens &&
                                 values.extent(2) == info.head_dim));
}

void RowMeter::form_outputs(const WeightBlock& block) {
  const Index head_dim = *info_.head_dim;
  outputs_.resize(static_cast<std::size_t>(info_.query_heads * block.rows() * head_dim));
  pulls_.resize(static_cast<std::size_t>(info_.query_heads * block.rows() * block.stride));
  Index first = block.stride;
  Index keys = 0;
  for (const std::vector<Range>& visible : block.visible) {
    first = std::min(first, visible.front().begin);
    keys = std::max(keys, visible.back().end);
  }
  resident_.resize(static_cast<std::size_t>(keys - first));
  std::iota(resident_.begin(), resident_.end(), first);
  const Index rows = info_.group_heads() * block.rows();
  coefficients_.resize(static_cast<std::size_t>(rows) * resident_.size());
  for (Index k = 0; k < info_.kv_heads; ++k) {
    for (Index r = 0; r < rows; ++r) {
      const Index head = k * info_.group_heads() + r / block.rows();
      const float sum = block.sum(head, r % block.rows());
      kernels::gather_normalised(block.row(head, r % block.rows()), sum == 0.0f ? 1.0f : sum, resident_,
                                 coefficients_.data() + static_cast<std::size_t>(r) * resident_.size());
    }
    kernels::weighted_values(coefficients_.data(), rows, resident_, values_[k].data(), head_dim,
                             outputs_.data() + k * rows * head_dim);
    kernels::squared_pulls(coefficients_.data(), rows, keys - first, values_[k][first].data(),
                           outputs_.data() + k * rows * head_dim, head_dim,
                           pulls_.data() + k * rows * block.stride + first, block.stride);
  }
  outputs_formed_ = true;
}

std::span<const RowMeter::Measured> RowMeter::measure(const Rows& rows, Index row) {
  const WeightBlock& block = rows.block();
  const auto block_row = static_cast<Index>(rows.block_row(row));
  for (Index h = 0; h < info_.query_heads; ++h) {
    Measured& measured = measured_[static_cast<std::size_t>(h)];
    measured = {kAbsent, kAbsent, kAbsent, kAbsent, kAbsent, false};
    const auto all = static_cast<double>(block.sum(h, block_row));
    if (all == 0.0) {
      continue;  // A masked row is in no population.
    }
    const auto evicted = static_cast<double>(
        kernels::sum_dropped(block.row(h, block_row), rows.keep_of_head(h), block.stride));
    const auto resident = static_cast<double>(rows.resident_sum(h, row));
    measured.removed_all = resident == 0.0;
    if (measured.removed_all) {
      measured.missed_mass = 1.0;
      continue;
    }
    measured.missed_mass = std::min(1.0, evicted / all);
    measured.kl = std::max(0.0, -std::log(resident / all));
  }
  if (!values_.empty()) {
    if (!outputs_formed_) {
      form_outputs(block);
    }
    for (Index k = 0; k < info_.kv_heads; ++k) {
      measure_outputs(rows, row, k);
    }
  }
  return measured_;
}

std::span<const RowMeter::Measured> RowMeter::measure_merged(const Rows& full, Index full_row,
                                                             const Rows& own, Index own_row,
                                                             View<const float, 3> values) {
  HAE_EXPECTS(!values_.empty());
  if (!outputs_formed_) {
    form_outputs(full.block());
  }
  for (Index h = 0; h < info_.query_heads; ++h) {
    measured_[at(h)] = {kAbsent, kAbsent, kAbsent, kAbsent, kAbsent, false};
    if (full.block().sum(h, static_cast<Index>(full.block_row(full_row))) > 0.0f) {
      measure_merged_head(full, full_row, own, own_row, values, h);
    }
  }
  return measured_;
}

void RowMeter::measure_merged_head(const Rows& full, Index full_row, const Rows& own, Index own_row,
                                   View<const float, 3> values, Index head) {
  Measured& measured = measured_[at(head)];
  const WeightBlock& block = own.block();
  const float resident_sum = own.resident_sum(head, own_row);
  measured.removed_all = resident_sum == 0.0f;
  if (measured.removed_all) {
    return;
  }
  const float* keep = own.keep_of_head(head);
  resident_.clear();
  for (const Range& range : own.visible(own_row)) {
    for (Index j = range.begin; j < range.end; ++j) {
      if (keep[j] != 0.0f) {
        resident_.push_back(j);
      }
    }
  }
  const Index head_dim = *info_.head_dim;
  coefficients_.resize(resident_.size());
  partial_.resize(at(head_dim));
  kernels::gather_normalised(block.row(head, static_cast<Index>(own.block_row(own_row))), resident_sum,
                             resident_, coefficients_.data());
  kernels::weighted_values(coefficients_.data(), 1, resident_, values[head / info_.group_heads()].data(),
                           head_dim, partial_.data());
  const auto row = static_cast<Index>(full.block_row(full_row));
  const double* output = outputs_.data() + (head * full.block().rows() + row) * head_dim;
  for (Index d = 0; d < head_dim; ++d) {
    partial_[at(d)] = output[d] - partial_[at(d)];
  }
  measured.output_error = norm({partial_.data(), at(head_dim)});
  const double length = norm({output, at(head_dim)});
  measured.output_error_relative = length > 0.0 ? measured.output_error / length : kAbsent;
}

std::span<const double> RowMeter::top_now(const Rows& rows, Index row) {
  const WeightBlock& block = rows.block();
  const auto block_row = static_cast<Index>(rows.block_row(row));
  if (top_row_ != block_row) {
    count_weights(block, block_row);
  }
  const std::vector<Range>& visible = block.visible[rows.block_row(row)];
  Index keys = 0;
  for (const Range& range : visible) {
    keys += range.size();
  }
  top_now_.assign(static_cast<std::size_t>(info_.query_heads), kAbsent);
  for (Index h = 0; h < info_.query_heads; ++h) {
    const auto all = static_cast<double>(block.sum(h, block_row));
    if (all > 0.0) {
      const float* keep = rows.keep_of_head(h);
      const Index residents = std::count(keep, keep + block.stride, 1.0f);
      top_now_[static_cast<std::size_t>(h)] =
          outside_largest(histograms_[static_cast<std::size_t>(h)], block.row(h, block_row), visible,
                          std::min(residents, keys), all, block.stride);
    }
  }
  return top_now_;
}

void RowMeter::count_weights(const WeightBlock& block, Index row) {
  top_row_ = row;
  histograms_.resize(static_cast<std::size_t>(info_.query_heads));
  for (Index h = 0; h < info_.query_heads; ++h) {
    Histogram& histogram = histograms_[static_cast<std::size_t>(h)];
    histogram.outside.clear();
    histogram.counts.assign(kBins, 0);
    const float* weights = block.row(h, row);
    for (const Range& range : block.visible[static_cast<std::size_t>(row)]) {
      for (Index j = range.begin; j < range.end; ++j) {
        ++histogram.counts[bin_of(weights[j])];
      }
    }
  }
}

/// Missed mass of the row when only its `count` largest weights stay.
double RowMeter::outside_largest(Histogram& histogram, const float* weights, std::span<const Range> visible,
                                 Index count, double all, Index stride) {
  const auto known = std::ranges::find(histogram.outside, count, &std::pair<Index, double>::first);
  if (known != histogram.outside.end()) {
    return known->second;
  }
  // The smallest weight that stays lies in the bin in which counts from the top reach `count`.
  std::size_t bin = kBins - 1;
  Index left = count;  // that stay from this bin down
  for (; histogram.counts[bin] < left; --bin) {
    left -= histogram.counts[bin];
  }
  candidates_.clear();
  for (const Range& range : visible) {
    std::copy_if(weights + range.begin, weights + range.end, std::back_inserter(candidates_),
                 [&](float w) { return bin_of(w) == bin; });
  }
  const auto smallest = candidates_.begin() + left - 1;
  std::ranges::nth_element(candidates_, smallest, std::greater{});
  const float threshold = *smallest;
  top_.resize(static_cast<std::size_t>(stride));
  std::transform(weights, weights + stride, top_.begin(),
                 [&](float w) { return w > threshold ? 1.0f : 0.0f; });
  // Of those equal to it as many stay as there is room for: the newer ones.
  Index equal = left - std::count_if(candidates_.begin(), smallest, [&](float w) { return w > threshold; });
  for (auto range = visible.rbegin(); range != visible.rend() && equal > 0; ++range) {
    for (Index j = range->end - 1; j >= range->begin && equal > 0; --j) {
      if (weights[j] == threshold) {
        top_[static_cast<std::size_t>(j)] = 1.0f;
        --equal;
      }
    }
  }
  const double outside =
      std::min(1.0, static_cast<double>(kernels::sum_dropped(weights, top_.data(), stride)) / all);
  histogram.outside.emplace_back(count, outside);
  return outside;
}

void RowMeter::measure_outputs(const Rows& rows, Index row, Index kv_head) {
  const Index first_head = kv_head * info_.group_heads();
  const float* keep = rows.keep_of_head(first_head);
  const std::vector<Range>& visible = rows.block().visible[rows.block_row(row)];
  evicted_.clear();
  resident_.clear();
  for (Index j = visible.front().begin; j < visible.back().end; ++j) {
    (keep[j] == 0.0f ? evicted_ : resident_).push_back(j);
  }
  measure_pulls(rows.block(), static_cast<Index>(rows.block_row(row)), first_head);
  by_complement_.clear();
  by_residents_.clear();
  for (Index h = first_head; h < first_head + info_.group_heads(); ++h) {
    const Measured& measured = measured_[static_cast<std::size_t>(h)];
    if (std::isnan(measured.kl)) {
      continue;
    }
    // o' is summed over the residents, or formed from the complement where that is shorter and well
    // conditioned.
    const bool complement = measured.missed_mass <= 0.5 && evicted_.size() < resident_.size();
    (complement ? by_complement_ : by_residents_).push_back(h);
  }
  measure_outputs_of(rows, row, kv_head, by_complement_, evicted_, true);
  measure_outputs_of(rows, row, kv_head, by_residents_, resident_, false);
}

/// Of the query heads of one KV head, over what their lane evicted.
void RowMeter::measure_pulls(const WeightBlock& block, Index block_row, Index first_head) {
  const Index heads = info_.group_heads();
  missed_pulls_.resize(static_cast<std::size_t>(heads));
  kernels::sum_listed(pulls_.data() + (first_head * block.rows() + block_row) * block.stride, heads,
                      block.rows() * block.stride, evicted_, missed_pulls_.data());
  for (Index g = 0; g < heads; ++g) {
    if (block.sum(first_head + g, block_row) > 0.0f) {
      measured_[static_cast<std::size_t>(first_head + g)].missed_pull =
          missed_pulls_[static_cast<std::size_t>(g)];
    }
  }
}

void RowMeter::measure_outputs_of(const Rows& rows, Index row, Index kv_head, const std::vector<Index>& heads,
                                  const std::vector<Index>& tokens, bool complement) {
  const WeightBlock& block = rows.block();
  const auto block_row = static_cast<Index>(rows.block_row(row));
  const Index head_dim = *info_.head_dim;
  coefficients_.resize(heads.size() * tokens.size());
  partial_.resize(heads.size() * static_cast<std::size_t>(head_dim));
  for (std::size_t i = 0; i < heads.size(); ++i) {
    const float divisor = complement ? block.sum(heads[i], block_row) : rows.resident_sum(heads[i], row);
    kernels::gather_normalised(block.row(heads[i], block_row), divisor, tokens,
                               coefficients_.data() + i * tokens.size());
  }
  kernels::weighted_values(coefficients_.data(), static_cast<Index>(heads.size()), tokens,
                           values_[kv_head].data(), head_dim, partial_.data());
  for (std::size_t i = 0; i < heads.size(); ++i) {
    Measured& measured = measured_[static_cast<std::size_t>(heads[i])];
    const double* output = outputs_.data() + (heads[i] * block.rows() + block_row) * head_dim;
    double* difference = partial_.data() + static_cast<Index>(i) * head_dim;
    for (Index d = 0; d < head_dim; ++d) {
      const double evicting =
          complement ? (output[d] - difference[d]) / (1.0 - measured.missed_mass) : difference[d];
      difference[d] = output[d] - evicting;
    }
    const auto size = static_cast<std::size_t>(head_dim);
    // Where nothing is missed a' is a, and the error is 0 by definition, not by rounding.
    measured.output_error = measured.missed_mass > 0.0 ? norm({difference, size}) : 0.0;
    const double length = norm({output, size});
    measured.output_error_relative = length > 0.0 ? measured.output_error / length : kAbsent;
  }
}

}  // namespace hae
