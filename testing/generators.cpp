#include "testing/generators.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "testing/smaller_traces.hpp"
#include "testing/stream.hpp"

namespace hae::testing {
namespace {

/// `keys` multiples of 1/64 that sum to exactly 1; sums over up to 64 heads and hundreds of rows are exact in
/// double.
std::vector<float> dyadic_row(Index keys, Stream& stream) {
  std::vector<Index> units(static_cast<std::size_t>(keys), 0);
  for (Index unit = 0; unit < 64; ++unit) {
    ++units[static_cast<std::size_t>(stream.below(keys))];
  }
  std::vector<float> row;
  for (const Index unit : units) {
    row.push_back(static_cast<float>(unit) / 64.0f);
  }
  return row;
}

/// Scales non-negative numbers to a sum of 1 within float32 rounding; an all-zero row becomes one-hot.
std::vector<float> normalised(std::vector<float> row) {
  const double sum = std::accumulate(row.begin(), row.end(), 0.0);
  if (sum == 0.0) {
    row.front() = 1.0f;
    return row;
  }
  for (float& weight : row) {
    weight = static_cast<float>(static_cast<double>(weight) / sum);
  }
  return row;
}

std::vector<float> make_row(RowKind kind, Index keys, Stream& stream) {
  std::vector<float> row(static_cast<std::size_t>(keys), 0.0f);
  switch (kind) {
    case RowKind::masked:
      return row;
    case RowKind::one_hot:
      row[static_cast<std::size_t>(stream.below(keys))] = 1.0f;
      return row;
    case RowKind::uniform:
      std::ranges::fill(row, 1.0f);
      return normalised(row);
    case RowKind::ties:
      std::ranges::generate(row, [&] { return static_cast<float>(1 + stream.below(2)); });
      return normalised(row);
    case RowKind::with_zeros:
      std::ranges::generate(row, [&] { return stream.below(2) == 0 ? 0.0f : stream.unit(); });
      return normalised(row);
    case RowKind::subnormal:
      std::ranges::generate(row, [&] { return static_cast<float>(stream.below(9)) * 0x1p-149f; });
      row[static_cast<std::size_t>(stream.below(keys))] = 1.0f;
      return row;
    case RowKind::spread:
      break;
  }
  // Squares spread the weights; a planted outlier lets a test about bounds fail.
  std::ranges::generate(row, [&] {
    const float u = stream.unit();
    return u * u + 1e-4f;
  });
  row[static_cast<std::size_t>(stream.below(keys))] += 4.0f;
  return normalised(row);
}

Index draw(Index low, Index high) {
  return *rc::gen::inRange<Index>(low, high + 1);
}

/// Shape and modality of a trace: grouped heads, up to three pictures anywhere in the prompt, also at its
/// ends.
SequenceInfo draw_info(const TraceBounds& bounds, Payload payload) {
  SequenceInfo info;
  info.name = "generated";
  info.group = info.name;
  info.payload = payload;
  info.layers = draw(1, bounds.most_layers);
  info.kv_heads = draw(1, 2);
  info.query_heads = info.kv_heads * draw(1, 3);
  info.tokens = draw(std::max<Index>(bounds.least_tokens, bounds.prunable ? 2 : 1), bounds.most_tokens);
  const Index longest = bounds.allow_decode_less ? info.tokens : std::max<Index>(1, info.tokens - 1);
  info.prompt = draw(bounds.prunable ? std::clamp<Index>(bounds.least_tokens / 2, 2, longest) : 1, longest);
  info.generated = info.steps() + 1;
  // A rotary embedding turns pairs of dimensions.
  info.head_dim = bounds.unrotated_queries ? 2 * draw(1, 3) : draw(1, 5);
  info.element_bytes = 4;
  info.scale = 1.0 / std::sqrt(static_cast<double>(*info.head_dim));
  info.has_values = true;
  info.masks.resize(static_cast<std::size_t>(info.layers));
  info.image.assign(static_cast<std::size_t>(info.tokens), -1);
  const Index pictures = draw(bounds.prunable ? 1 : 0, 3);
  const Index most = info.prompt - (bounds.prunable ? 1 : 0);
  for (Index picture = 0; picture < pictures; ++picture) {
    const Index begin = draw(0, most - 1);
    const Index end = draw(begin + 1, most);
    std::fill(info.image.begin() + begin, info.image.begin() + end, picture);
  }
  info.prompt_rows.resize(static_cast<std::size_t>(info.prompt));
  std::iota(info.prompt_rows.begin(), info.prompt_rows.end(), 0);
  return info;
}

void fill_values(MemoryTrace& trace, Stream& stream) {
  const SequenceInfo& info = trace.info;
  for (Index layer = 0; layer < info.layers; ++layer) {
    std::vector<float>& values =
        trace.values.emplace_back(static_cast<std::size_t>(info.kv_heads * info.tokens * *info.head_dim));
    std::ranges::generate(values, [&] { return stream.signed_unit(); });
    values[static_cast<std::size_t>(stream.below(static_cast<Index>(values.size())))] *= 50.0f;
  }
}

/// Queries before a rotary embedding of the usual base: as good as any to a policy, which only turns them.
void fill_unrotated(MemoryTrace& trace, Stream& stream) {
  SequenceInfo& info = trace.info;
  const Index pairs = *info.head_dim / 2;
  Rotary& rotary = info.rotary.emplace();
  for (Index pair = 0; pair < pairs; ++pair) {
    rotary.inverse_frequency.push_back(
        std::pow(10000.0, -static_cast<double>(pair) / static_cast<double>(pairs)));
  }
  for (const std::vector<float>& queries : trace.queries) {
    std::ranges::generate(trace.unrotated_queries.emplace_back(queries.size()),
                          [&] { return 3.0f * stream.signed_unit(); });
  }
}

void fill_similarity(MemoryTrace& trace, Stream& stream) {
  SequenceInfo& info = trace.info;
  info.has_embedding_similarity = true;
  const Index visual = std::count_if(info.image.begin(), info.image.begin() + info.prompt,
                                     [](Index image) { return image >= 0; });
  trace.similarity.resize(at(visual * (info.prompt - visual)));
  std::ranges::generate(trace.similarity, [&] { return static_cast<double>(stream.signed_unit()); });
}

RowKind draw_kind(const TraceBounds& bounds) {
  return *rc::gen::weightedElement<RowKind>({{6, RowKind::spread},
                                             {1, RowKind::one_hot},
                                             {1, RowKind::uniform},
                                             {2, RowKind::ties},
                                             {2, RowKind::with_zeros},
                                             {1, RowKind::subnormal},
                                             {bounds.allow_masked ? 1U : 0U, RowKind::masked}});
}

/// Whether a smaller trace still is what was asked for.
bool fits(const SequenceInfo& info, const TraceBounds& bounds) {
  const bool has_picture = std::ranges::any_of(info.image, [](Index image) { return image >= 0; });
  return info.tokens >= bounds.least_tokens && (bounds.allow_decode_less || info.steps() > 0) &&
         (!bounds.prunable || (has_picture && !info.is_visual(info.prompt - 1)));
}

/// The generator with shrinking by what a trace is, not by what it was drawn from: what stays of a
/// counterexample is as it was.
rc::Gen<MemoryTrace> shrinking(const TraceBounds& bounds, const rc::Gen<MemoryTrace>& drawn) {
  if (bounds.dyadic) {
    return drawn;  // Part of a dyadic row, normalised again, is none.
  }
  const auto smaller = [bounds](const MemoryTrace& trace) {
    std::vector<MemoryTrace> traces = smaller_traces(trace);
    std::erase_if(traces, [&](const MemoryTrace& one) { return !fits(one.info, bounds); });
    return rc::seq::fromContainer(std::move(traces));
  };
  return [=](const rc::Random& random, int size) {
    return rc::shrinkable::shrinkRecur(drawn(random, size).value(), smaller);
  };
}

}  // namespace

rc::Gen<MemoryTrace> attention_traces(const TraceBounds& bounds) {
  return shrinking(bounds, rc::gen::exec([bounds] {
                     MemoryTrace trace;
                     trace.info = draw_info(bounds, Payload::attention);
                     const SequenceInfo& info = trace.info;
                     Stream stream(*rc::gen::arbitrary<std::uint64_t>());
                     const auto tokens = static_cast<std::size_t>(info.tokens);
                     for (Index layer = 0; layer < info.layers; ++layer) {
                       std::vector<float>& matrix = trace.attention.emplace_back(
                           static_cast<std::size_t>(info.query_heads) * tokens * tokens, 0.0f);
                       for (Index head = 0; head < info.query_heads; ++head) {
                         const RowKind kind =
                             draw_kind(bounds);  // most rows of a head are of one kind, every fifth is spread
                         for (Index i = 0; i < info.tokens; ++i) {
                           const std::vector<float> row =
                               bounds.dyadic ? dyadic_row(i + 1, stream)
                                             : make_row(i % 5 == 4 ? RowKind::spread : kind, i + 1, stream);
                           std::ranges::copy(row, matrix.begin() + (head * info.tokens + i) * info.tokens);
                         }
                       }
                     }
                     fill_values(trace, stream);
                     if (bounds.embedding_similarity) {
                       fill_similarity(trace, stream);
                     }
                     return trace;
                   }));
}

rc::Gen<MemoryTrace> qkv_traces(const TraceBounds& bounds) {
  return shrinking(bounds, rc::gen::exec([bounds] {
                     MemoryTrace trace;
                     trace.info = draw_info(bounds, Payload::qkv);
                     SequenceInfo& info = trace.info;
                     for (MaskRule& mask : info.masks) {
                       mask.window = *rc::gen::element<Index>(0, 0, 1, 3, 7);
                       mask.bidirectional = *rc::gen::element(
                           MaskRule::Bidirectional::none, MaskRule::Bidirectional::none,
                           MaskRule::Bidirectional::image, MaskRule::Bidirectional::image_in_window);
                     }
                     Stream stream(*rc::gen::arbitrary<std::uint64_t>());
                     for (Index layer = 0; layer < info.layers; ++layer) {
                       std::vector<float>& queries = trace.queries.emplace_back(
                           static_cast<std::size_t>(info.query_heads * info.tokens * *info.head_dim));
                       std::vector<float>& keys = trace.keys.emplace_back(
                           static_cast<std::size_t>(info.kv_heads * info.tokens * *info.head_dim));
                       std::ranges::generate(queries, [&] { return 3.0f * stream.signed_unit(); });
                       std::ranges::generate(keys, [&] { return 3.0f * stream.signed_unit(); });
                       keys[static_cast<std::size_t>(stream.below(static_cast<Index>(keys.size())))] *= 20.0f;
                     }
                     fill_values(trace, stream);
                     if (bounds.unrotated_queries) {
                       fill_unrotated(trace, stream);
                     }
                     if (bounds.embedding_similarity) {
                       fill_similarity(trace, stream);
                     }
                     return trace;
                   }));
}

rc::Gen<MemoryTrace> traces_for(const Policy& policy, TraceBounds bounds) {
  // What a policy needs may depend on the layer, and hardly on more.
  SequenceInfo sample;
  sample.layers = std::max<Index>(bounds.most_layers, 1);
  sample.query_heads = sample.kv_heads = sample.tokens = sample.prompt = 1;
  sample.masks.resize(at(sample.layers));
  sample.image = {-1};
  sample.prompt_rows = {0};
  bool keys = false;
  for (Index layer = 0; layer < sample.layers; ++layer) {
    const Needs needs = policy.needs(sample, layer);
    keys = keys || needs.keys || needs.unrotated_queries;
    bounds.unrotated_queries = bounds.unrotated_queries || needs.unrotated_queries;
    bounds.embedding_similarity = bounds.embedding_similarity || needs.embedding_similarity;
  }
  return keys ? qkv_traces(bounds) : rc::gen::oneOf(attention_traces(bounds), qkv_traces(bounds));
}

}  // namespace hae::testing
