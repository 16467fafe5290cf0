#include "python/engine/array_trace.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "sim/errors.hpp"

namespace hae::python {
namespace {

constexpr const char* kWhere = "arrays";

template <typename Extent>
std::string shape_text(const Extent& extent) {
  return "[" + std::to_string(extent(0)) + ", " + std::to_string(extent(1)) + ", " +
         std::to_string(extent(2)) + "]";
}

void require(bool holds, const std::string& message) {
  if (!holds) {
    throw TraceError(std::string(kWhere) + ": " + message);
  }
}

void expect_shape(const LayerArrays& layers, const std::string& what, Index count,
                  std::array<Index, 3> shape) {
  require(static_cast<Index>(layers.size()) == count,
          what + " has " + std::to_string(layers.size()) + " layers, expected " + std::to_string(count));
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    const auto found = [&](std::size_t axis) { return static_cast<Index>(layers[layer].shape(axis)); };
    const auto expected = [&](std::size_t axis) { return shape[axis]; };
    require(found(0) == shape[0] && found(1) == shape[1] && found(2) == shape[2],
            what + " of layer " + std::to_string(layer) + " is " + shape_text(found) + ", expected " +
                shape_text(expected));
  }
}

std::vector<MaskRule> masks_of(const std::optional<std::vector<Index>>& window, Index layers) {
  if (!window) {
    return std::vector<MaskRule>(at(layers));
  }
  std::vector<MaskRule> masks(window->size());
  for (std::size_t layer = 0; layer < masks.size(); ++layer) {
    masks[layer].window = (*window)[layer];
  }
  return masks;
}

void check_element_bytes(Index bytes) {
  const std::array<Index, 4> allowed{1, 2, 4, 8};
  require(std::ranges::find(allowed, bytes) != allowed.end(),
          "element_bytes is " + std::to_string(bytes) + ", expected 1, 2, 4 or 8");
}

SequenceInfo info_of(const Arrays& arrays, const ArraysInfo& more) {
  const bool stored = !arrays.attention.empty();
  const LayerArrays& rows = stored ? arrays.attention : arrays.queries;
  const LayerArrays& cached = stored ? arrays.values : arrays.keys;
  require(!rows.empty(), "neither q nor attention has a layer; give q, k and v, or attention");
  require(cached.empty() || !(more.kv_heads || more.head_dim),
          "kv_heads and head_dim follow from k and v; leave them out");
  check_element_bytes(more.element_bytes);
  SequenceInfo info;
  info.name = more.name;
  info.group = more.group.value_or(more.name);
  info.payload = stored ? Payload::attention : Payload::qkv;
  info.layers = static_cast<Index>(rows.size());
  info.query_heads = static_cast<Index>(rows.front().shape(0));
  info.tokens = static_cast<Index>(rows.front().shape(1));
  info.kv_heads =
      cached.empty() ? more.kv_heads.value_or(info.query_heads) : static_cast<Index>(cached.front().shape(0));
  info.head_dim = cached.empty() ? more.head_dim : static_cast<Index>(cached.front().shape(2));
  info.element_bytes = info.head_dim ? std::optional(more.element_bytes) : std::nullopt;
  info.prompt = more.prompt;
  info.generated = info.tokens - more.prompt + 1;
  info.scale =
      more.scale.value_or(info.head_dim ? 1.0 / std::sqrt(static_cast<double>(*info.head_dim)) : 1.0);
  info.has_values = !arrays.values.empty();
  info.row_sum_tolerance = traces::row_sum_tolerance(more.stored);
  info.masks = masks_of(more.window, info.layers);
  info.image = more.image.value_or(std::vector<Index>(at(info.tokens), -1));
  info.prompt_rows.resize(at(std::max<Index>(more.prompt, 0)));
  std::iota(info.prompt_rows.begin(), info.prompt_rows.end(), Index{0});
  check_info(info, kWhere);
  require(std::ranges::none_of(info.image, [](Index image) { return image < -1; }),
          "image holds " + std::to_string(std::ranges::min(info.image)) +
              ", expected the number of a picture, or -1 for text");
  require(more.token.empty() || static_cast<Index>(more.token.size()) == info.tokens,
          "tokens has " + std::to_string(more.token.size()) + " entries, expected " +
              std::to_string(info.tokens));
  return info;
}

void check_shapes(const Arrays& arrays, const SequenceInfo& info) {
  if (info.payload == Payload::attention) {
    expect_shape(arrays.attention, "attention", info.layers, {info.query_heads, info.tokens, info.tokens});
  } else {
    expect_shape(arrays.queries, "q", info.layers, {info.query_heads, info.tokens, *info.head_dim});
    expect_shape(arrays.keys, "k", info.layers, {info.kv_heads, info.tokens, *info.head_dim});
  }
  if (info.has_values) {
    expect_shape(arrays.values, "v", info.layers, {info.kv_heads, info.tokens, *info.head_dim});
  }
}

}  // namespace

struct ArrayTrace::Content {
  SequenceInfo info;
  Arrays arrays;

  Content(SequenceInfo i, Arrays a) : info(std::move(i)), arrays(std::move(a)) {}
  Content(const Content&) = delete;
  Content& operator=(const Content&) = delete;
  ~Content() {
    const nb::gil_scoped_acquire gil;  // the last owner may be a thread of the engine
    arrays = {};
  }
};

class ArrayTrace::ArrayLayer final : public LayerPayload {
 public:
  ArrayLayer(std::shared_ptr<const Content> content, Index layer)
      : content_(std::move(content)), layer_(at(layer)) {}

  [[nodiscard]] View<const float, 3> keys() override { return view(content_->arrays.keys[layer_]); }
  [[nodiscard]] View<const float, 3> values() override {
    return content_->info.has_values ? view(content_->arrays.values[layer_]) : View<const float, 3>();
  }

  void read_queries(Range rows, View<float, 3> out) override {
    const View<const float, 3> queries = view(content_->arrays.queries[layer_]);
    for (Index h = 0; h < out.extent(0); ++h) {
      std::copy_n(queries[h][rows.begin].data(), rows.size() * queries.extent(2), out[h].data());
    }
  }

  void read_prompt_attention(Range rows, View<float, 3> out) override {
    for (Index h = 0; h < out.extent(0); ++h) {
      for (Index r = 0; r < rows.size(); ++r) {
        copy_row(h, content_->info.prompt_rows[at(rows.begin + r)], out[h][r]);
      }
    }
  }

  void read_decode_attention(Index step, View<float, 2> out) override {
    for (Index h = 0; h < out.extent(0); ++h) {
      copy_row(h, content_->info.prompt + step - 1, out[h]);
    }
  }

 private:
  void copy_row(Index head, Index query, View<float, 1> out) const {
    std::copy_n(view(content_->arrays.attention[layer_])[head][query].data(), out.extent(0), out.data());
  }

  std::shared_ptr<const Content> content_;
  std::size_t layer_;
};

class ArrayTrace::ArraySequence final : public Sequence {
 public:
  explicit ArraySequence(std::shared_ptr<const Content> content) : content_(std::move(content)) {}
  [[nodiscard]] const SequenceInfo& info() const override { return content_->info; }
  [[nodiscard]] std::unique_ptr<LayerPayload> layer(Index layer) override {
    return std::make_unique<ArrayLayer>(content_, layer);
  }

 private:
  std::shared_ptr<const Content> content_;
};

ArrayTrace::ArrayTrace(Arrays arrays, const ArraysInfo& more) {
  SequenceInfo info = info_of(arrays, more);
  check_shapes(arrays, info);
  content_ = std::make_shared<const Content>(std::move(info), std::move(arrays));
  details_.token = more.token;
}

std::unique_ptr<Sequence> ArrayTrace::open(Index) {
  return std::make_unique<ArraySequence>(content_);
}

}  // namespace hae::python
