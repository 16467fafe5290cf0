#include "reference/visual_pruning.hpp"

#include <algorithm>
#include <functional>
#include <string>

#include "reference/keep_everything.hpp"

namespace hae::reference {

bool VisualPruningPlan::decides(const SequenceInfo& info, Index layer) const {
  const Index end = clears_earlier_layers ? info.layers : info.layers - 1;
  return layer < end && std::ranges::find(layers, layer) != layers.end();
}

std::vector<Index> parse_deciding_layers(const Options& options, Index least) {
  std::vector<Index> layers = options.counts("layers", least);
  if (std::ranges::adjacent_find(layers, std::ranges::greater_equal{}) != layers.end()) {
    options.fail("layers");
  }
  return layers;
}

VisualPruningRun::VisualPruningRun(const SequenceInfo& info, VisualPruningPlan plan)
    : info_(info),
      plan_(std::move(plan)),
      visual_tokens_(std::count_if(info.image.begin(), info.image.begin() + info.prompt,
                                   [](Index image) { return image >= 0; })),
      is_gone_(at(info.prompt), false) {}

void VisualPruningRun::begin_layer(Index layer, const LayerVectors& /*vectors*/) {
  const bool has_both = visual_tokens_ > 0 && visual_tokens_ < info_.prompt;
  is_deciding_ = has_both && plan_.decides(info_, layer);
  if (is_deciding_) {
    attention_.sums.assign(at(info_.prompt), 0.0);
    attention_.largest.assign(at(info_.prompt), 0.0);
    attention_.rows.assign(at(info_.prompt), 0);
  }
}

void VisualPruningRun::observe(const Rows& rows) {
  for (Index r = 0; is_deciding_ && r < rows.rows(); ++r) {
    if (!scores(rows.query(r))) {
      continue;
    }
    const std::span<const double> a = rows.values({}, 0, r);
    for (const Range& range : rows.visible(r)) {
      for (std::size_t j = at(range.begin); j < at(range.end); ++j) {
        attention_.sums[j] += a[j];
        attention_.largest[j] = std::max(attention_.largest[j], a[j]);
        ++attention_.rows[j];
      }
    }
  }
}

std::vector<Index> VisualPruningRun::candidates() const {
  std::vector<Index> tokens;
  for (Index j = 0; j < info_.prompt; ++j) {
    if (info_.is_visual(j) && !is_gone_[at(j)] && attention_.rows[at(j)] > 0) {
      tokens.push_back(j);
    }
  }
  return tokens;
}

/// What is known before the first row.
std::vector<std::string> VisualPruningRun::reservations() const {
  const std::string where = std::string(plan_.policy) + ": ";
  const std::string visual = std::to_string(visual_tokens_);
  if (visual_tokens_ == 0) {
    return {where + "visual tokens: 0, nothing to prune"};
  }
  if (visual_tokens_ == info_.prompt) {
    return {where + "no text queries in the prompt, all " + visual + " visual tokens kept"};
  }
  std::vector<std::string> warnings;
  for (const Index layer : plan_.layers) {
    if (!plan_.decides(info_, layer)) {
      warnings.push_back(where + "nothing is pruned by layer " + std::to_string(layer) + " of a model of " +
                         std::to_string(info_.layers) + " layers");
    }
  }
  return warnings;
}

Decision VisualPruningRun::prune(Index layer, const LayerCache& /*cache*/) {
  Decision decision;
  decision.effect = plan_.effect;
  if (layer == 0) {
    decision.warnings = reservations();
  }
  if (!is_deciding_) {
    return decision;
  }
  const std::vector<Index> tokens = candidates();
  const auto stage = std::ranges::find(plan_.layers, layer) - plan_.layers.begin();
  const std::vector<Scored> chosen =
      tokens.empty() ? std::vector<Scored>{} : choose(at(stage), tokens, attention_);
  const Index left = visual_tokens_ - static_cast<Index>(dropped_.size());
  const std::string where = std::string(plan_.policy) + ", layer " + std::to_string(layer) + ": ";
  if (const Index unseen = left - static_cast<Index>(tokens.size()); unseen > 0) {
    decision.warnings.push_back(where + std::to_string(unseen) + " of " + std::to_string(left) +
                                " visual tokens are seen by none of the rows that score them, and kept");
  }
  if (!tokens.empty() && chosen.size() == tokens.size()) {
    decision.warnings.push_back(where + "all " + std::to_string(tokens.size()) + " candidates evicted");
  }
  for (const Scored& token : chosen) {
    is_gone_[at(token.token)] = true;
    dropped_.push_back({layer, token});
    for (Index later = layer + 1; later < info_.layers; ++later) {
      decision.evict.push_back({later, Evict::kEveryLane, token.token, token.score});
    }
  }
  return decision;
}

Decision VisualPruningRun::balance(const std::vector<LayerCache>& /*caches*/) {
  Decision decision;
  for (const Dropped& dropped : dropped_) {
    for (Index layer = 0; plan_.clears_earlier_layers && layer <= dropped.layer; ++layer) {
      decision.evict.push_back({layer, Evict::kEveryLane, dropped.token.token, dropped.token.score});
    }
  }
  return decision;
}

std::unique_ptr<LayerDecode> VisualPruningRun::decode(Index /*layer*/) {
  return std::make_unique<KeepEverything>();
}

}  // namespace hae::reference
