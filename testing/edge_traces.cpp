#include "testing/edge_traces.hpp"

#include <algorithm>
#include <cmath>

namespace hae::testing {
namespace {

using Rows = std::vector<std::vector<float>>;

/// Causal rows in which key j weighs weight(i, j), normalised.
template <typename Weight>
Rows rows_of(Index tokens, const Weight& weight) {
  Rows rows;
  for (Index i = 0; i < tokens; ++i) {
    std::vector<float> row;
    double sum = 0.0;
    for (Index j = 0; j <= i; ++j) {
      sum += weight(i, j);
    }
    for (Index j = 0; j <= i; ++j) {
      row.push_back(static_cast<float>(weight(i, j) / sum));
    }
    rows.push_back(row);
  }
  return rows;
}

std::vector<Index> pictures(Index tokens, const std::vector<Range>& ranges) {
  std::vector<Index> image(static_cast<std::size_t>(tokens), -1);
  Index id = 0;
  for (const Range& range : ranges) {
    std::fill(image.begin() + range.begin, image.begin() + range.end, id++);
  }
  return image;
}

/// A number that depends on two others and looks irregular, in [-1, 1].
float irregular(Index a, Index b) {
  return std::sin(static_cast<float>(a * 37 + b * 11));
}

void add_values(MemoryTrace& trace) {
  trace.info.has_values = true;
  const Index size = trace.info.kv_heads * trace.info.tokens * *trace.info.head_dim;
  for (Index layer = 0; layer < trace.info.layers; ++layer) {
    std::vector<float>& values = trace.values.emplace_back();
    for (Index i = 0; i < size; ++i) {
      values.push_back(irregular(layer, i));
    }
  }
}

}  // namespace

MemoryTrace recomputed_trace(const RecomputedShape& shape) {
  const std::vector<Rows> of_layer(4, Rows{{1.0f}});
  MemoryTrace trace = attention_trace(std::vector<std::vector<Rows>>(shape.windows.size(), of_layer), 2,
                                      shape.prompt, pictures(shape.tokens, shape.pictures));
  trace.info.payload = Payload::qkv;
  trace.info.scale = 0.5;
  trace.info.rotary = Rotary{{1.0, 0.1, 0.01, 0.001}, false};
  trace.attention.clear();
  add_values(trace);
  for (Index layer = 0; layer < trace.info.layers; ++layer) {
    trace.info.masks[at(layer)].window = shape.windows[at(layer)];
    const auto fill = [&](std::vector<float>& numbers, Index heads, Index salt) {
      for (Index i = 0; i < heads * shape.tokens * 8; ++i) {
        numbers.push_back(shape.all_equal ? 1.0f : 2.0f * irregular(i, layer + salt));
      }
    };
    fill(trace.queries.emplace_back(), 4, 3);
    fill(trace.unrotated_queries.emplace_back(), 4, 9);
    fill(trace.keys.emplace_back(), 2, 5);
  }
  return trace;
}

std::map<std::string, MemoryTrace> edge_traces() {
  const auto uneven = [](Index i, Index j) {
    return 1.0 + std::fmod(static_cast<double>(i * 7 + j * j * 3), 11.0);
  };
  const auto ties = [](Index, Index) { return 1.0; };
  std::map<std::string, MemoryTrace> all;
  for (const Index tokens : {31, 32, 33, 65}) {
    const Rows rows = rows_of(tokens, uneven);
    all["uneven " + std::to_string(tokens)] =
        attention_trace({{rows, rows, rows, rows}, {rows, rows, rows, rows}}, 2, tokens - 9,
                        pictures(tokens, {{2, 8}, {10, 14}}));
  }
  all["ties only"] = attention_trace({rows_of(24, ties), rows_of(24, ties)}, 16, pictures(24, {{0, 9}}));
  all["no picture"] = attention_trace({rows_of(20, uneven)}, 10, pictures(20, {}));
  all["no text"] = attention_trace({rows_of(12, uneven)}, 12, pictures(12, {{0, 12}}));
  all["one token"] = attention_trace({rows_of(1, ties)}, 1, pictures(1, {}));
  all["prompt only"] = attention_trace({rows_of(18, uneven)}, 18, pictures(18, {{3, 9}}));
  all["prompt of one token"] = attention_trace({rows_of(14, uneven)}, 1, pictures(14, {}));
  Rows masked = rows_of(16, uneven);
  for (const std::size_t row : {2U, 5U, 12U}) {
    std::ranges::fill(masked[row], 0.0f);
  }
  all["masked rows"] = attention_trace({masked, masked}, 9, pictures(16, {{1, 5}}));
  for (auto& [name, trace] : all) {
    add_values(trace);
  }
  all["recomputed"] = recomputed_trace({});
  all["recomputed, with a window"] = recomputed_trace({.windows = {0, 6}});
  all["recomputed, windows only"] = recomputed_trace({.tokens = 70, .prompt = 40, .windows = {5, 33}});
  all["recomputed, ties only"] = recomputed_trace({.all_equal = true});
  all["recomputed, two pictures"] =
      recomputed_trace({.tokens = 66, .prompt = 50, .pictures = {{2, 20}, {25, 31}}, .windows = {0, 0, 0}});
  all["recomputed, no picture"] = recomputed_trace({.pictures = {}, .windows = {0}});
  all["recomputed, prompt only"] = recomputed_trace({.tokens = 33, .prompt = 33});
  all["recomputed, one token"] = recomputed_trace({.tokens = 1, .prompt = 1, .pictures = {}});
  return all;
}

}  // namespace hae::testing
