#include "testing/memory_trace.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <ostream>

namespace hae::testing {
namespace {

class MemoryLayer final : public LayerPayload {
 public:
  MemoryLayer(const MemoryTrace& trace, std::size_t layer) : trace_(trace), layer_(layer) {}

  View<const float, 3> keys() override { return view(trace_.keys); }
  View<const float, 3> values() override {
    return trace_.values.empty() ? View<const float, 3>{} : view(trace_.values);
  }

  View<const double, 2> embedding_similarity() override {
    const auto size = static_cast<Index>(trace_.similarity.size());
    const SequenceInfo& info = trace_.info;
    const Index visual = std::count_if(info.image.begin(), info.image.begin() + info.prompt,
                                       [](Index image) { return image >= 0; });
    return size == 0 ? View<const double, 2>{}
                     : View<const double, 2>{trace_.similarity.data(), {visual, size / visual}};
  }

  void read_queries(Range rows, View<float, 3> out) override { copy_rows(trace_.queries, rows, out); }

  void read_unrotated_queries(Range rows, View<float, 3> out) override {
    copy_rows(trace_.unrotated_queries, rows, out);
  }

  void read_prompt_attention(Range rows, View<float, 3> out) override {
    for (Index h = 0; h < trace_.info.query_heads; ++h) {
      for (Index r = 0; r < rows.size(); ++r) {
        const Index query = trace_.info.prompt_rows[static_cast<std::size_t>(rows.begin + r)];
        std::copy_n(row(h, query), trace_.info.prompt, out[h][r].data());
      }
    }
  }

  void read_decode_attention(Index step, View<float, 2> out) override {
    const Index query = trace_.info.prompt + step - 1;
    for (Index h = 0; h < trace_.info.query_heads; ++h) {
      std::copy_n(row(h, query), query + 1, out[h].data());
    }
  }

 private:
  void copy_rows(const std::vector<std::vector<float>>& queries, Range rows, View<float, 3> out) const {
    const SequenceInfo& info = trace_.info;
    for (Index h = 0; h < info.query_heads; ++h) {
      const float* head = queries[layer_].data() + h * info.tokens * *info.head_dim;
      std::copy(head + rows.begin * *info.head_dim, head + rows.end * *info.head_dim, out[h].data());
    }
  }

  [[nodiscard]] View<const float, 3> view(const std::vector<std::vector<float>>& array) const {
    const SequenceInfo& info = trace_.info;
    return {array[layer_].data(), {info.kv_heads, info.tokens, *info.head_dim}};
  }

  [[nodiscard]] const float* row(Index head, Index query) const {
    return trace_.attention[layer_].data() + (head * trace_.info.tokens + query) * trace_.info.tokens;
  }

  const MemoryTrace& trace_;
  std::size_t layer_;
};

}  // namespace

std::unique_ptr<LayerPayload> MemorySequence::layer(Index layer) {
  return std::make_unique<MemoryLayer>(trace_, static_cast<std::size_t>(layer));
}

MemoryTrace attention_trace(const std::vector<std::vector<std::vector<std::vector<float>>>>& layers,
                            Index kv_heads, Index prompt, const std::vector<Index>& image) {
  MemoryTrace trace;
  SequenceInfo& info = trace.info;
  info.name = "by hand";
  info.group = "by hand";
  info.payload = Payload::attention;
  info.layers = static_cast<Index>(layers.size());
  info.query_heads = static_cast<Index>(layers.front().size());
  info.kv_heads = kv_heads;
  info.tokens = static_cast<Index>(image.size());
  info.prompt = prompt;
  info.generated = info.steps() + 1;
  info.head_dim = 8;
  info.element_bytes = 2;
  info.image = image;
  info.masks.resize(layers.size());
  for (Index row = 0; row < prompt; ++row) {
    info.prompt_rows.push_back(row);
  }
  const auto tokens = static_cast<std::size_t>(info.tokens);
  for (const auto& heads : layers) {
    std::vector<float>& matrix = trace.attention.emplace_back(heads.size() * tokens * tokens, 0.0f);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      for (std::size_t i = 0; i < heads[h].size(); ++i) {
        std::ranges::copy(heads[h][i],
                          matrix.begin() + static_cast<std::ptrdiff_t>((h * tokens + i) * tokens));
      }
    }
  }
  check_info(info, "by hand");
  return trace;
}

MemoryTrace attention_trace(const std::vector<std::vector<std::vector<float>>>& layers, Index prompt,
                            const std::vector<Index>& image) {
  std::vector<std::vector<std::vector<std::vector<float>>>> with_heads;
  for (const auto& layer : layers) {
    with_heads.push_back({layer});
  }
  return attention_trace(with_heads, 1, prompt, image);
}

RunResult run(const MemoryTrace& trace, const std::shared_ptr<const Policy>& policy,
              const ReplayOptions& options) {
  MemorySequence sequence(trace);
  return replay(sequence, {policy}, options, "memory").front();
}

std::string brief(const EvictionLog& log) {
  std::string text;
  for (const LogEntry& entry : log.entries) {
    text += (text.empty() ? "" : " ") + std::to_string(entry.step) + "/" + std::to_string(entry.layer) + "/" +
            std::to_string(entry.lane) + "/" + std::to_string(entry.token) + (entry.within ? "w" : "") +
            (entry.pending_since ? "@" + std::to_string(*entry.pending_since) : "");
  }
  return text;
}

ModelRows::ModelRows(const MemoryTrace& trace, Index layer, const std::vector<Index>& positions) {
  const SequenceInfo& info = trace.info;
  const auto rows_of = [&](const std::vector<float>& from, Index heads, std::vector<float>& to) {
    const Index head_dim = *info.head_dim;
    for (Index h = 0; h < heads; ++h) {
      for (const Index position : positions) {
        const auto row = from.begin() + (h * info.tokens + position) * head_dim;
        to.insert(to.end(), row, row + head_dim);
      }
    }
    return View<const float, 3>{to.data(), {heads, static_cast<Index>(positions.size()), head_dim}};
  };
  rows = {rows_of(trace.queries[at(layer)], info.query_heads, queries),
          rows_of(trace.keys[at(layer)], info.kv_heads, keys),
          rows_of(trace.values[at(layer)], info.kv_heads, values)};
}

ClosedLoop::Finished run_closed(const MemoryTrace& trace, const std::shared_ptr<const Policy>& policy,
                                Index steps) {
  ClosedLoop loop(trace.info, policy, NanRule::error, "model");
  for (Index layer = 0; layer < trace.info.layers; ++layer) {
    std::vector<Index> present;
    for (Index token = 0; token < trace.info.prompt; ++token) {
      if (!std::ranges::binary_search(loop.absent(layer), token)) {
        present.push_back(token);
      }
    }
    loop.prefill(layer, ModelRows(trace, layer, present).rows);
  }
  for (Index step = 1; step <= steps; ++step) {
    for (Index layer = 0; layer < trace.info.layers; ++layer) {
      loop.step(layer, ModelRows(trace, layer, {trace.info.prompt + step - 1}).rows);
    }
  }
  return loop.finish();
}

bool same_numbers(std::span<const double> a, std::span<const double> b) {
  return std::ranges::equal(a, b,
                            [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); });
}

bool same_results(const RunResult& a, const RunResult& b) {
  bool same = a.log == b.log && to_json_lines(a.log) == to_json_lines(b.log) &&
              a.attention_tokens == b.attention_tokens && a.final_tokens == b.final_tokens &&
              a.prefill_tokens == b.prefill_tokens && a.moved == b.moved &&
              a.removed_all_rows == b.removed_all_rows && a.masked_rows == b.masked_rows &&
              a.lowered_weights == b.lowered_weights && same_numbers(a.top_now, b.top_now);
  for (const Metric metric : kMetrics) {
    same = same && same_numbers(a.decode.all(metric), b.decode.all(metric)) &&
           same_numbers(a.prefill.all(metric), b.prefill.all(metric));
  }
  return same;
}

std::vector<std::vector<Index>> residents(const MemoryTrace& trace, const RunResult& run, Index layer,
                                          Index lane) {
  const Index logged = run.lanes == LaneKind::layer ? kLayerLane : lane;
  std::vector<std::vector<Index>> after;
  for (Index step = 0; step <= trace.info.steps(); ++step) {
    std::vector<Index> kept;
    for (Index token = 0; token < trace.info.prompt + step; ++token) {
      const bool gone = std::ranges::any_of(run.log.entries, [&](const LogEntry& e) {
        return e.layer == layer && e.lane == logged && e.token == token && e.step <= step;
      });
      if (!gone) {
        kept.push_back(token);
      }
    }
    after.push_back(kept);
  }
  return after;
}

namespace {

/// Rows of numbers, one a line.
///
/// what  names row i
template <typename What>
void print_rows(std::ostream& out, const std::vector<float>& numbers, Index width, const What& what) {
  for (Index begin = 0; begin < static_cast<Index>(numbers.size()); begin += width) {
    out << "\n  " << what(begin / width) << ":";
    for (Index i = begin; i < begin + width; ++i) {
      std::array<char, 32> text;
      const auto end = std::to_chars(text.data(), text.data() + text.size(), numbers[at(i)]).ptr;
      out << ' ' << std::string_view(text.data(), end);
    }
  }
}

void print_layer(std::ostream& out, const MemoryTrace& trace, Index layer) {
  const Index tokens = trace.info.tokens;
  const auto print = [&](const std::vector<std::vector<float>>& layers, Index width,
                         const std::string& what) {
    if (!layers.empty()) {
      print_rows(out, layers[at(layer)], width, [&](Index row) {
        return what + ", head " + std::to_string(row / tokens) + ", token " + std::to_string(row % tokens);
      });
    }
  };
  print(trace.attention, tokens, "attention");
  const Index head_dim = trace.info.head_dim.value_or(1);
  print(trace.queries, head_dim, "query");
  print(trace.unrotated_queries, head_dim, "query before rotary embedding");
  print(trace.keys, head_dim, "key");
  print(trace.values, head_dim, "value");
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const MemoryTrace& trace) {
  const SequenceInfo& info = trace.info;
  out << (info.payload == Payload::qkv ? "qkv" : "attention") << ": " << info.layers << " layers, "
      << info.query_heads << " query heads, " << info.kv_heads << " KV heads, P " << info.prompt << ", T "
      << info.tokens << ", scale " << info.scale << ", image";
  for (const Index image : info.image) {
    out << ' ' << image;
  }
  for (Index layer = 0; layer < info.layers; ++layer) {
    const MaskRule& mask = info.masks[at(layer)];
    out << "\nlayer " << layer << ": window " << mask.window
        << (mask.bidirectional == MaskRule::Bidirectional::none    ? ""
            : mask.bidirectional == MaskRule::Bidirectional::image ? ", images see themselves"
                                                                   : ", images see themselves in the window");
    if (info.tokens <= kShownTokens) {
      print_layer(out, trace, layer);
    }
  }
  return out;
}

}  // namespace hae::testing
