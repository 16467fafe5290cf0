#include "tests/support/generators.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/support/stream.hpp"

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
  info.head_dim = draw(1, 5);
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

RowKind draw_kind(const TraceBounds& bounds) {
  return *rc::gen::weightedElement<RowKind>({{6, RowKind::spread},
                                             {1, RowKind::one_hot},
                                             {1, RowKind::uniform},
                                             {2, RowKind::ties},
                                             {2, RowKind::with_zeros},
                                             {1, RowKind::subnormal},
                                             {bounds.allow_masked ? 1U : 0U, RowKind::masked}});
}

std::string option(const std::string& key, const std::string& value) {
  return key + "=" + value + ",";
}

/// Options of pruning; empty for the policy's default.
std::string draw_pruning() {
  const std::string rule = *rc::gen::element<std::string>("none", "threshold", "threshold", "mass");
  std::string spec = option("dap", rule);
  if (rule == "none") {
    return spec;
  }
  if (rule == "mass") {
    spec += option("eps", *rc::gen::element<std::string>("0", "0.05", "0.3", "1"));
  } else {
    spec += option("r", *rc::gen::element<std::string>("0.01", "0.1", "0.5"));
    spec += option("alpha", *rc::gen::element<std::string>("0.05", "0.5", "2"));
  }
  spec += option("heads", *rc::gen::element<std::string>("mean", "max"));
  spec += option("scope", *rc::gen::element<std::string>("sequence", "image"));
  spec += option("max_evicted", *rc::gen::element<std::string>("none", "none", "2"));
  const std::string broadcast = *rc::gen::element<std::string>("all", "all", "none");
  spec += option("broadcast", broadcast);
  return broadcast == "all" ? spec + option("effect", *rc::gen::element<std::string>("within", "after"))
                            : spec;
}

std::string draw_scores() {
  const std::string lane = *rc::gen::element<std::string>("layer", "kv_head");
  const std::string group = lane == "layer" ? "mean" : *rc::gen::element<std::string>("mean", "max", "sum");
  return option("lane", lane) + option("group", group) +
         option("score", *rc::gen::element<std::string>("sum", "mean")) +
         option("scores", *rc::gen::element<std::string>("observed", "full"));
}

}  // namespace

rc::Gen<MemoryTrace> attention_traces(const TraceBounds& bounds) {
  return rc::gen::exec([bounds] {
    MemoryTrace trace;
    trace.info = draw_info(bounds, Payload::attention);
    const SequenceInfo& info = trace.info;
    Stream stream(*rc::gen::arbitrary<std::uint64_t>());
    const auto tokens = static_cast<std::size_t>(info.tokens);
    for (Index layer = 0; layer < info.layers; ++layer) {
      std::vector<float>& matrix =
          trace.attention.emplace_back(static_cast<std::size_t>(info.query_heads) * tokens * tokens, 0.0f);
      for (Index head = 0; head < info.query_heads; ++head) {
        const RowKind kind = draw_kind(bounds);  // most rows of a head are of one kind, every fifth is spread
        for (Index i = 0; i < info.tokens; ++i) {
          const std::vector<float> row = bounds.dyadic
                                             ? dyadic_row(i + 1, stream)
                                             : make_row(i % 5 == 4 ? RowKind::spread : kind, i + 1, stream);
          std::ranges::copy(row, matrix.begin() + (head * info.tokens + i) * info.tokens);
        }
      }
    }
    fill_values(trace, stream);
    return trace;
  });
}

rc::Gen<MemoryTrace> qkv_traces(const TraceBounds& bounds) {
  return rc::gen::exec([bounds] {
    MemoryTrace trace;
    trace.info = draw_info(bounds, Payload::qkv);
    SequenceInfo& info = trace.info;
    for (MaskRule& mask : info.masks) {
      mask.window = *rc::gen::element<Index>(0, 0, 1, 3, 7);
      mask.bidirectional =
          *rc::gen::element(MaskRule::Bidirectional::none, MaskRule::Bidirectional::none,
                            MaskRule::Bidirectional::image, MaskRule::Bidirectional::image_in_window);
    }
    Stream stream(*rc::gen::arbitrary<std::uint64_t>());
    for (Index layer = 0; layer < info.layers; ++layer) {
      std::vector<float>& queries = trace.queries.emplace_back(
          static_cast<std::size_t>(info.query_heads * info.tokens * *info.head_dim));
      std::vector<float>& keys =
          trace.keys.emplace_back(static_cast<std::size_t>(info.kv_heads * info.tokens * *info.head_dim));
      std::ranges::generate(queries, [&] { return 3.0f * stream.signed_unit(); });
      std::ranges::generate(keys, [&] { return 3.0f * stream.signed_unit(); });
      keys[static_cast<std::size_t>(stream.below(static_cast<Index>(keys.size())))] *= 20.0f;
    }
    fill_values(trace, stream);
    return trace;
  });
}

rc::Gen<std::string> policy_specs(const SequenceInfo& info) {
  return rc::gen::exec([info] {
    const std::string policy = *rc::gen::element<std::string>(
        "hae", "hae", "hae", "greedy", "h2o/layerwise", "window", "random", "full", "tova", "h2o/flexgen",
        "h2o/history", "scissorhands", "nacl", "fastv", "fastv/text-mean", "sparsevlm", "mustdrop");
    const Index budget = draw(2, std::max<Index>(2, info.tokens));
    const std::string budget_text = std::to_string(budget);
    std::string spec = policy + ":";
    if (policy == "hae") {
      spec +=
          draw_pruning() + draw_scores() + option("ddes", *rc::gen::element<std::string>("mark", "batch"));
      spec += option("bin", *rc::gen::element<std::string>("1", "2", "5", "15%", "0.5"));
      spec += option("budget", budget_text) + option("sinks", std::to_string(draw(0, 1)));
    } else if (policy == "greedy") {
      spec += draw_pruning() + draw_scores();
      spec += option("budget", budget_text) + option("recent", std::to_string(draw(0, 1))) +
              option("sinks", std::to_string(draw(0, 1)));
    } else if (policy == "h2o/layerwise") {
      spec += option("budget", budget_text);
    } else if (policy == "window") {
      spec += option("budget", budget_text) + option("sinks", std::to_string(draw(0, 2)));
    } else if (policy == "random") {
      spec += option("budget", budget_text) + option("seed", std::to_string(draw(0, 3))) +
              option("lane", *rc::gen::element<std::string>("layer", "kv_head"));
    } else if (policy == "fastv" || policy == "fastv/text-mean") {
      spec += option("layer", "1") + option("keep", *rc::gen::element<std::string>("1", "2", "50%")) +
              option("scope", *rc::gen::element<std::string>("sequence", "image")) +
              option("effect", *rc::gen::element<std::string>("within", "after"));
    } else if (policy == "sparsevlm") {
      spec += option("layers", "1") + option("keep", *rc::gen::element<std::string>("1", "2", "50%"));
    } else if (policy == "mustdrop") {
      spec += option("layers", *rc::gen::element<std::string>("0", "0/1", "1/2")) +
              option("tau_global", *rc::gen::element<std::string>("0.1", "0.5", "2")) +
              option("tau_individual", *rc::gen::element<std::string>("0.1", "1.5"));
    } else if (policy == "tova" || policy == "h2o/flexgen") {
      spec += option("budget", budget_text);
    } else if (policy != "full") {
      spec += option("budget", budget_text) + option("sinks", std::to_string(draw(0, 1))) +
              option("recent", std::to_string(draw(0, 1)));
      spec +=
          policy == "scissorhands" ? option("select", *rc::gen::element<std::string>("top", "sample")) : "";
    }
    spec.pop_back();
    return spec;
  });
}

std::ostream& operator<<(std::ostream& out, const MemoryTrace& trace) {
  const SequenceInfo& info = trace.info;
  out << info.layers << " layers, " << info.query_heads << " query heads, " << info.kv_heads
      << " KV heads, P " << info.prompt << ", T " << info.tokens << ", image";
  for (const Index image : info.image) {
    out << ' ' << image;
  }
  if (info.tokens > 6) {
    return out;
  }
  for (std::size_t layer = 0; layer < trace.attention.size(); ++layer) {
    for (Index row = 0; row < info.query_heads * info.tokens; ++row) {
      out << "\n  layer " << layer << " head " << row / info.tokens << " row " << row % info.tokens << ":";
      for (Index j = 0; j <= row % info.tokens; ++j) {
        out << ' ' << trace.attention[layer][static_cast<std::size_t>(row * info.tokens + j)];
      }
    }
  }
  return out;
}

}  // namespace hae::testing
