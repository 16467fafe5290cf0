#include "sim/mask.hpp"

#include <algorithm>
#include <map>

namespace hae {

Mask::Mask(const SequenceInfo& info, Index layer) {
  HAE_EXPECTS(layer >= 0 && layer < static_cast<Index>(info.masks.size()));
  rule_ = info.masks[static_cast<std::size_t>(layer)];
  rule_.window = std::min(rule_.window, info.tokens);  // A wider window is none, and its sums could overflow.
  if (rule_.bidirectional == MaskRule::Bidirectional::none) {
    return;
  }
  std::map<Index, Index> pictures;  // image id -> index into ranges_
  picture_.assign(static_cast<std::size_t>(info.prompt), -1);
  for (Index j = 0; j < info.prompt; ++j) {
    if (!info.is_visual(j)) {
      continue;
    }
    const Index id = info.image[static_cast<std::size_t>(j)];
    const auto [entry, is_new] = pictures.try_emplace(id, static_cast<Index>(ranges_.size()));
    if (is_new) {
      ranges_.emplace_back();
    }
    picture_[static_cast<std::size_t>(j)] = entry->second;
    std::vector<Range>& ranges = ranges_[static_cast<std::size_t>(entry->second)];
    if (!ranges.empty() && ranges.back().end == j) {
      ++ranges.back().end;
    } else {
      ranges.push_back({j, j + 1});
    }
  }
}

std::span<const Range> Mask::image_ranges(Index query) const {
  if (query >= static_cast<Index>(picture_.size()) || picture_[static_cast<std::size_t>(query)] < 0) {
    return {};
  }
  return ranges_[static_cast<std::size_t>(picture_[static_cast<std::size_t>(query)])];
}

void Mask::visible(Index query, std::vector<Range>& out) const {
  const Index causal_begin = rule_.window > 0 ? std::max<Index>(0, query - rule_.window + 1) : 0;
  out.assign(1, {causal_begin, query + 1});
  const bool bounded = rule_.bidirectional == MaskRule::Bidirectional::image_in_window && rule_.window > 0;
  for (Range range : image_ranges(query)) {
    if (bounded) {
      range.begin = std::max(range.begin, query - rule_.window + 1);
      range.end = std::min(range.end, query + rule_.window);
    }
    if (range.begin < range.end) {
      out.push_back(range);
    }
  }
  if (out.size() == 1) {
    return;
  }
  std::sort(out.begin(), out.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  std::size_t last = 0;
  for (std::size_t i = 1; i < out.size(); ++i) {
    if (out[i].begin <= out[last].end) {
      out[last].end = std::max(out[last].end, out[i].end);
    } else {
      out[++last] = out[i];
    }
  }
  out.resize(last + 1);
}

}  // namespace hae
