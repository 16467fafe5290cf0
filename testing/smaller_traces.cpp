#include "testing/smaller_traces.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace hae::testing {
namespace {

using Layers = std::vector<std::vector<float>>;

/// [0, count) without one, or all of it.
std::vector<Index> all_but(Index count, Index without = -1) {
  std::vector<Index> kept;
  for (Index i = 0; i < count; ++i) {
    if (i != without) {
      kept.push_back(i);
    }
  }
  return kept;
}

/// The pieces of `size` elements with the given indices.
template <typename Number>
std::vector<Number> pieces(const std::vector<Number>& from, Index size, const std::vector<Index>& indices) {
  std::vector<Number> kept;
  for (const Index i : indices) {
    kept.insert(kept.end(), from.begin() + i * size, from.begin() + (i + 1) * size);
  }
  return kept;
}

void keep_pieces(Layers& layers, Index size, const std::vector<Index>& indices) {
  for (std::vector<float>& layer : layers) {
    layer = pieces(layer, size, indices);
  }
}

/// Indices of (head, kept token) into [heads, tokens].
std::vector<Index> of_heads(Index heads, Index tokens, const std::vector<Index>& kept) {
  std::vector<Index> indices;
  for (Index head = 0; head < heads; ++head) {
    std::ranges::transform(kept, std::back_inserter(indices), [&](Index t) { return head * tokens + t; });
  }
  return indices;
}

/// What is left of rows of probabilities, [rows][tokens], normalised again; row i of a head is token i's.
void normalise(std::vector<float>& rows, const std::vector<bool>& was_masked, Index tokens) {
  for (Index row = 0; row < static_cast<Index>(was_masked.size()); ++row) {
    const auto begin = rows.begin() + row * tokens;
    const double sum = std::accumulate(begin, begin + tokens, 0.0);
    if (sum == 0.0 && !was_masked[at(row)]) {
      begin[row % tokens] = 1.0f;
    } else if (sum != 0.0) {
      std::for_each(begin, begin + tokens,
                    [&](float& weight) { weight = static_cast<float>(static_cast<double>(weight) / sum); });
    }
  }
}

void keep_tokens_of_attention(MemoryTrace& trace, const SequenceInfo& before,
                              const std::vector<Index>& kept) {
  for (std::vector<float>& matrix : trace.attention) {
    matrix = pieces(matrix, before.tokens, of_heads(before.query_heads, before.tokens, kept));
    std::vector<bool> was_masked;
    for (auto row = matrix.begin(); row != matrix.end(); row += before.tokens) {
      was_masked.push_back(
          std::all_of(row, row + before.tokens, [](float weight) { return weight == 0.0f; }));
    }
    matrix = pieces(matrix, 1, of_heads(static_cast<Index>(was_masked.size()), before.tokens, kept));
    if (kept.back() + 1 != static_cast<Index>(kept.size())) {  // A prefix of a causal row has all of it.
      normalise(matrix, was_masked, trace.info.tokens);
    }
  }
}

/// Inner products of the visual and text tokens that are kept.
std::vector<double> kept_similarity(const MemoryTrace& trace, const std::vector<Index>& kept) {
  std::vector<double> similarity;
  Index cell = 0;
  for (Index visual = 0; visual < trace.info.prompt; ++visual) {
    for (Index text = 0; trace.info.is_visual(visual) && text < trace.info.prompt; ++text) {
      if (!trace.info.is_visual(text)) {
        if (std::ranges::binary_search(kept, visual) && std::ranges::binary_search(kept, text)) {
          similarity.push_back(trace.similarity[at(cell)]);
        }
        ++cell;
      }
    }
  }
  return similarity;
}

MemoryTrace without_layer(MemoryTrace trace, Index layer) {
  --trace.info.layers;
  trace.info.masks.erase(trace.info.masks.begin() + layer);
  for (Layers* layers :
       {&trace.queries, &trace.unrotated_queries, &trace.keys, &trace.values, &trace.attention}) {
    if (!layers->empty()) {
      layers->erase(layers->begin() + layer);
    }
  }
  return trace;
}

/// Some KV heads, and of each the first query heads of its group.
MemoryTrace with_heads(MemoryTrace trace, const std::vector<Index>& kv_heads, Index group_heads) {
  SequenceInfo& info = trace.info;
  std::vector<Index> query_heads;
  for (const Index kv_head : kv_heads) {
    for (Index i = 0; i < group_heads; ++i) {
      query_heads.push_back(kv_head * info.group_heads() + i);
    }
  }
  const Index of_vectors = info.tokens * info.head_dim.value_or(1);
  keep_pieces(trace.queries, of_vectors, query_heads);
  keep_pieces(trace.unrotated_queries, of_vectors, query_heads);
  keep_pieces(trace.keys, of_vectors, kv_heads);
  keep_pieces(trace.values, of_vectors, kv_heads);
  keep_pieces(trace.attention, info.tokens * info.tokens, query_heads);
  info.kv_heads = static_cast<Index>(kv_heads.size());
  info.query_heads = static_cast<Index>(query_heads.size());
  return trace;
}

MemoryTrace without_pictures(MemoryTrace trace) {
  std::ranges::fill(trace.info.image, -1);
  trace.similarity.clear();
  return trace;
}

MemoryTrace without_masks(MemoryTrace trace) {
  std::ranges::fill(trace.info.masks, MaskRule{});
  return trace;
}

/// Queries, keys and values as whole numbers, away from 0, which an output must not be.
MemoryTrace in_whole_numbers(MemoryTrace trace) {
  for (Layers* layers : {&trace.queries, &trace.keys, &trace.values}) {
    for (std::vector<float>& layer : *layers) {
      std::ranges::transform(layer, layer.begin(),
                             [](float x) { return std::copysign(std::ceil(std::fabs(x)), x); });
    }
  }
  return trace;
}

}  // namespace

MemoryTrace with_tokens(const MemoryTrace& trace, const std::vector<Index>& kept) {
  const SequenceInfo& before = trace.info;
  HAE_EXPECTS(!kept.empty() && kept.front() < before.prompt);
  MemoryTrace smaller = trace;
  SequenceInfo& info = smaller.info;
  info.tokens = static_cast<Index>(kept.size());
  info.prompt = std::ranges::lower_bound(kept, before.prompt) - kept.begin();
  info.generated = info.steps() + 1;
  info.image = pieces(before.image, 1, kept);
  info.prompt_rows.clear();
  for (Index row = 0; row < info.prompt; ++row) {
    if (std::ranges::binary_search(before.prompt_rows, kept[at(row)])) {
      info.prompt_rows.push_back(row);
    }
  }
  const Index head_dim = before.head_dim.value_or(1);
  keep_pieces(smaller.queries, head_dim, of_heads(before.query_heads, before.tokens, kept));
  keep_pieces(smaller.unrotated_queries, head_dim, of_heads(before.query_heads, before.tokens, kept));
  keep_pieces(smaller.keys, head_dim, of_heads(before.kv_heads, before.tokens, kept));
  keep_pieces(smaller.values, head_dim, of_heads(before.kv_heads, before.tokens, kept));
  keep_tokens_of_attention(smaller, before, kept);
  if (!trace.similarity.empty()) {
    smaller.similarity = kept_similarity(trace, kept);
  }
  return smaller;
}

std::vector<MemoryTrace> smaller_traces(const MemoryTrace& trace) {
  const SequenceInfo& info = trace.info;
  std::vector<MemoryTrace> smaller;
  if (info.tokens > 3) {
    smaller.push_back(with_tokens(trace, all_but(info.tokens / 2)));
  }
  for (Index layer = info.layers; info.layers > 1 && layer-- > 0;) {
    smaller.push_back(without_layer(trace, layer));
  }
  for (Index kv_head = info.kv_heads; info.kv_heads > 1 && kv_head-- > 0;) {
    smaller.push_back(with_heads(trace, all_but(info.kv_heads, kv_head), info.group_heads()));
  }
  if (info.group_heads() > 1) {
    smaller.push_back(with_heads(trace, all_but(info.kv_heads), info.group_heads() - 1));
  }
  for (Index token = info.tokens; info.tokens > 1 && token-- > 0;) {
    if (token >= info.prompt || info.prompt > 1) {
      smaller.push_back(with_tokens(trace, all_but(info.tokens, token)));
    }
  }
  if (std::ranges::any_of(info.image, [](Index image) { return image >= 0; })) {
    smaller.push_back(without_pictures(trace));
  }
  if (std::ranges::any_of(info.masks, [](const MaskRule& mask) { return mask != MaskRule{}; })) {
    smaller.push_back(without_masks(trace));
  }
  if (MemoryTrace whole = in_whole_numbers(trace);
      whole.queries != trace.queries || whole.keys != trace.keys || whole.values != trace.values) {
    smaller.push_back(std::move(whole));
  }
  return smaller;
}

}  // namespace hae::testing
