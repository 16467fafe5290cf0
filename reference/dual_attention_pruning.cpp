#include "reference/dual_attention_pruning.hpp"

#include <algorithm>

namespace hae::reference {

DualAttentionPruning::DualAttentionPruning(const SequenceInfo& info, const PruningOptions& options,
                                           Index sinks)
    : info_(info),
      options_(options),
      sinks_(sinks),
      sums_(static_cast<std::size_t>(info.prompt), 0.0),
      largest_(static_cast<std::size_t>(info.prompt), 0.0),
      seen_(static_cast<std::size_t>(info.prompt), false) {}

void DualAttentionPruning::observe(const Rows& rows) {
  for (Index r = 0; r < rows.rows(); ++r) {
    if (info_.is_visual(rows.query(r))) {
      continue;
    }
    ++text_rows_;
    const std::span<const double> a =
        rows.values({LaneKind::layer, options_.heads, Attention::observed}, 0, r);
    for (const Range& range : rows.visible(r)) {
      for (auto j = static_cast<std::size_t>(range.begin); j < static_cast<std::size_t>(range.end); ++j) {
        sums_[j] += a[j];
        largest_[j] = std::max(largest_[j], a[j]);
        seen_[j] = true;
      }
    }
  }
}

std::vector<Index> DualAttentionPruning::candidates() const {
  std::vector<Index> tokens;
  for (Index j = 0; j < info_.prompt; ++j) {
    if (info_.is_visual(j) && seen_[static_cast<std::size_t>(j)]) {
      tokens.push_back(j);
    }
  }
  return tokens;
}

std::map<Index, std::vector<Index>> DualAttentionPruning::scopes(const std::vector<Index>& candidates) const {
  std::map<Index, std::vector<Index>> scopes;
  for (const Index j : candidates) {
    const bool per_image = options_.scope == PruningOptions::Scope::image;
    scopes[per_image ? info_.image[static_cast<std::size_t>(j)] : 0].push_back(j);
  }
  return scopes;
}

double DualAttentionPruning::mass(const std::vector<Index>& tokens) const {
  double sum = 0.0;
  for (const Index j : tokens) {
    sum += sums_[static_cast<std::size_t>(j)];
  }
  return sum;
}

bool DualAttentionPruning::spared(Index token) const {
  return token < sinks_ || (options_.alpha && largest_[static_cast<std::size_t>(token)] >= *options_.alpha);
}

std::vector<Scored> DualAttentionPruning::below_thresholds(const std::vector<Index>& tokens) const {
  const double threshold = options_.r * mass(tokens);
  std::vector<Scored> evicted;
  for (const Index j : tokens) {
    const double sum = sums_[static_cast<std::size_t>(j)];
    if (!spared(j) && sum < threshold) {
      evicted.push_back({sum, j});
    }
  }
  return evicted;
}

std::vector<Scored> DualAttentionPruning::within_mass(const std::vector<Index>& tokens) const {
  const double total = mass(tokens);
  if (total == 0.0) {
    return {};
  }
  std::vector<Scored> order;
  for (const Index j : tokens) {
    if (!spared(j)) {
      order.push_back({sums_[static_cast<std::size_t>(j)], j});
    }
  }
  std::ranges::sort(order, goes_before);
  if (options_.eps >= 1.0) {
    return order;
  }
  const double allowed = options_.eps * total;
  double lost = 0.0;
  std::size_t count = 0;
  while (count < order.size() && lost + order[count].score <= allowed) {
    lost += order[count].score;
    ++count;
  }
  order.resize(count);
  return order;
}

std::vector<Scored> DualAttentionPruning::choose(const std::vector<Index>& tokens) const {
  std::vector<Scored> evicted;
  for (const auto& [scope, members] : scopes(tokens)) {
    const std::vector<Scored> chosen =
        options_.rule == PruningOptions::Rule::threshold ? below_thresholds(members) : within_mass(members);
    evicted.insert(evicted.end(), chosen.begin(), chosen.end());
  }
  if (options_.max_evicted && static_cast<Index>(evicted.size()) > *options_.max_evicted) {
    evicted = select_lowest(std::move(evicted), *options_.max_evicted);
  }
  return evicted;
}

std::vector<std::string> pruning_warnings(const SequenceInfo& info, Index layer,
                                          const PruningCounts& counts) {
  const std::string where = "dap, layer " + std::to_string(layer) + ": ";
  const auto count = [](auto n) { return std::to_string(n); };
  const Index visual = std::count_if(info.image.begin(), info.image.begin() + info.prompt,
                                     [](Index image) { return image >= 0; });
  const Index unseen = visual - counts.candidates;
  std::vector<std::string> warnings;
  if (visual == 0) {
    warnings.push_back(where + "visual tokens: 0, nothing to prune");
  } else if (counts.text_rows == 0) {
    warnings.push_back(where + "no text queries in the prompt, all " + count(visual) + " visual tokens kept");
  } else if (unseen > 0) {
    warnings.push_back(where + count(unseen) + " of " + count(visual) +
                       " visual tokens are seen by no text row and kept");
  }
  if (counts.candidates > 0 && counts.mass == 0.0) {
    warnings.push_back(where + "text pays no attention to the visual tokens, none pruned");
  }
  if (counts.candidates > 0 && counts.evicted == counts.candidates) {
    warnings.push_back(where + "all " + count(counts.candidates) + " candidates evicted");
  }
  return warnings;
}

Decision DualAttentionPruning::decide(Index layer) const {
  const std::vector<Index> tokens = candidates();
  const std::vector<Scored> evicted = choose(tokens);
  Decision decision;
  decision.effect = options_.effect;
  decision.warnings =
      pruning_warnings(info_, layer, {text_rows_, std::ssize(tokens), std::ssize(evicted), mass(tokens)});
  const bool all_layers = options_.broadcast == PruningOptions::Broadcast::all;
  for (Index target = all_layers ? 0 : layer; target < (all_layers ? info_.layers : layer + 1); ++target) {
    for (const Scored& token : evicted) {
      decision.evict.push_back({target, Evict::kEveryLane, token.token, token.score});
    }
  }
  return decision;
}

}  // namespace hae::reference
