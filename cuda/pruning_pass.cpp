#include "cuda/pruning_pass.hpp"

#include <algorithm>
#include <map>

#include "cuda/token_scores.hpp"

namespace hae::device {

/// [items, stride] what A_V each visual prompt token counts in: one for all, or one for each picture; -1 for
/// other tokens.
std::vector<Index> PruningPass::scopes() const {
  const Index stride = batch_.shape().stride;
  std::vector<Index> scopes(at(batch_.items() * stride), -1);
  for (Index i = 0; i < batch_.items(); ++i) {
    const SequenceInfo& info = layers_[at(i)].info();
    std::map<Index, Index> of_picture;
    for (Index token = 0; token < info.prompt; ++token) {
      if (info.is_visual(token)) {
        const Index picture = layers_.front().job->run.pruning->per_image ? info.image[at(token)] : 0;
        scopes[at(i * stride + token)] =
            of_picture.try_emplace(picture, std::ssize(of_picture)).first->second;
      }
    }
  }
  return scopes;
}

void PruningPass::run() {
  const Index items = batch_.items();
  const Index stride = batch_.shape().stride;
  const Pruning& pruning = *layers_.front().job->run.pruning;
  Array<double> sums(items * stride);
  Array<double> largest(items * stride);
  Array<std::uint8_t> seen(items * stride);
  sums.clear(stream_);
  largest.clear(stream_);
  seen.clear(stream_);
  Index most_rows = 0;
  for (const LayerJob& layer : layers_) {
    most_rows = std::max(most_rows, std::ssize(layer.info().prompt_rows));
  }
  const auto is_text = [&](Index item, Index position) {
    return !layers_[at(item)].info().is_visual(position);
  };
  const std::vector<Index> first(at(items), 0);
  for (Index begin = 0; begin < most_rows; begin += batch_.shape().rows) {
    const RowBlock block = batch_.form_prompt(first, begin, is_text);
    // No token of these layers has left yet, so that what is resident is what the mask allows.
    const RowValues values{.heads = pruning.heads, .divisors = block.sums, .stride = stride};
    add_text_rows(block, values, sums.data(), largest.data(), seen.data(), stream_);
  }
  const std::vector<Index> scopes = this->scopes();
  const Index scope_count = 1 + std::ranges::max(scopes);
  const Array<Index> scope = copy_of(scopes, stream_);
  Array<std::uint8_t> evicted(items * stride);
  const Buffer workspace(pruning_workspace_bytes(items, stride, std::max<Index>(1, scope_count)));
  choose_pruned({.items = items,
                 .stride = stride,
                 .scopes = std::max<Index>(1, scope_count),
                 .sums = sums.data(),
                 .largest = largest.data(),
                 .seen = seen.data(),
                 .scope = scope.data()},
                pruning.rule, workspace.data(), evicted.data(), stream_);
  batch_.expect_finite();
  const std::vector<double> all_sums = sums.read(stream_);
  const std::vector<std::uint8_t> all_seen = seen.read(stream_);
  const std::vector<std::uint8_t> all_evicted = evicted.read(stream_);
  for (Index i = 0; i < items; ++i) {
    const std::size_t begin = at(i * stride);
    report(i, {all_sums.data() + begin, at(stride)}, {all_seen.data() + begin, at(stride)},
           {all_evicted.data() + begin, at(stride)});
  }
}

void PruningPass::report(Index item, std::span<const double> sums, std::span<const std::uint8_t> seen,
                         std::span<const std::uint8_t> evicted) {
  const LayerJob& layer = layers_[at(item)];
  const SequenceInfo& info = layer.info();
  PruningReport report{.layer = layer.layer};
  for (const Index row : info.prompt_rows) {
    report.text_rows += info.is_visual(row) ? 0 : 1;
  }
  for (Index token = 0; token < info.prompt; ++token) {
    if (info.is_visual(token) && seen[at(token)] != 0) {
      ++report.candidates;
      report.mass += sums[at(token)];
    }
    if (evicted[at(token)] != 0) {
      layer.pruned->pruned.push_back({token, sums[at(token)]});
    }
  }
  report.evicted = std::ssize(layer.pruned->pruned);
  layer.run->pruning.push_back(report);
}

}  // namespace hae::device
