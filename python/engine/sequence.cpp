#include "python/engine/sequence.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>

#include "python/engine/module.hpp"
#include "sim/weights.hpp"
#include "traces/check.hpp"
#include "traces/trace_file.hpp"
#include "traces/trace_writer.hpp"

namespace hae::python {
namespace {

using Layers = std::vector<FloatArray>;

/// Arrays that Python made; they are viewed, and live as long as this does.
struct Arrays {
  SequenceInfo info;
  Layers queries;    ///< [layers][query_heads, T, head_dim]
  Layers keys;       ///< [layers][kv_heads, T, head_dim]
  Layers values;     ///< [layers][kv_heads, T, head_dim], or none
  Layers attention;  ///< [layers][query_heads, T, T]

  Arrays() = default;
  Arrays(const Arrays&) = delete;
  Arrays& operator=(const Arrays&) = delete;
  ~Arrays() {
    const nb::gil_scoped_acquire gil;  // the last owner may be a thread of the engine
    for (Layers* layers : {&queries, &keys, &values, &attention}) {
      layers->clear();
    }
  }
};

class ArrayLayer final : public LayerPayload {
 public:
  ArrayLayer(std::shared_ptr<const Arrays> arrays, Index layer)
      : arrays_(std::move(arrays)), layer_(at(layer)) {}

  [[nodiscard]] View<const float, 3> keys() override { return view(arrays_->keys[layer_]); }
  [[nodiscard]] View<const float, 3> values() override {
    return arrays_->values.empty() ? View<const float, 3>() : view(arrays_->values[layer_]);
  }

  void read_queries(Range rows, View<float, 3> out) override {
    const View<const float, 3> queries = view(arrays_->queries[layer_]);
    for (Index h = 0; h < out.extent(0); ++h) {
      std::copy_n(queries[h][rows.begin].data(), rows.size() * queries.extent(2), out[h].data());
    }
  }

  void read_prompt_attention(Range rows, View<float, 3> out) override {
    for (Index h = 0; h < out.extent(0); ++h) {
      for (Index r = 0; r < rows.size(); ++r) {
        copy_row(h, arrays_->info.prompt_rows[at(rows.begin + r)], out[h][r]);
      }
    }
  }

  void read_decode_attention(Index step, View<float, 2> out) override {
    for (Index h = 0; h < out.extent(0); ++h) {
      copy_row(h, arrays_->info.prompt + step - 1, out[h]);
    }
  }

 private:
  void copy_row(Index head, Index query, View<float, 1> out) const {
    std::copy_n(view(arrays_->attention[layer_])[head][query].data(), out.extent(0), out.data());
  }

  std::shared_ptr<const Arrays> arrays_;
  std::size_t layer_;
};

class ArraySequence final : public Sequence {
 public:
  explicit ArraySequence(std::shared_ptr<const Arrays> arrays) : arrays_(std::move(arrays)) {}
  [[nodiscard]] const SequenceInfo& info() const override { return arrays_->info; }
  [[nodiscard]] std::unique_ptr<LayerPayload> layer(Index layer) override {
    return std::make_unique<ArrayLayer>(arrays_, layer);
  }

 private:
  std::shared_ptr<const Arrays> arrays_;
};

class ArrayTrace final : public TraceSource {
 public:
  explicit ArrayTrace(std::shared_ptr<const Arrays> arrays) : arrays_(std::move(arrays)) {}
  [[nodiscard]] Index sequences() const override { return 1; }
  [[nodiscard]] std::unique_ptr<Sequence> open(Index) override {
    return std::make_unique<ArraySequence>(arrays_);
  }
  [[nodiscard]] std::string name() const override { return "arrays"; }

 private:
  std::shared_ptr<const Arrays> arrays_;
};

void expect_shape(const Layers& layers, const char* what, std::array<Index, 3> shape) {
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    for (std::size_t axis = 0; axis < 3; ++axis) {
      if (static_cast<Index>(layers[layer].shape(axis)) != shape[axis]) {
        const auto text = [](auto&& extent) {
          return "[" + std::to_string(extent(0)) + ", " + std::to_string(extent(1)) + ", " +
                 std::to_string(extent(2)) + "]";
        };
        throw TraceError(std::string("arrays: ") + what + " of layer " + std::to_string(layer) + " is " +
                         text([&](std::size_t a) { return layers[layer].shape(a); }) + ", expected " +
                         text([&](std::size_t a) { return shape[a]; }));
      }
    }
  }
}

void expect_layers(const Layers& layers, const char* what, Index count) {
  if (static_cast<Index>(layers.size()) != count) {
    throw TraceError(std::string("arrays: ") + what + " has " + std::to_string(layers.size()) +
                     " layers, expected " + std::to_string(count));
  }
}

SequenceHandle sequence_of_arrays(const std::string& name, const std::string& group, Index prompt,
                                  std::optional<double> scale, std::optional<Index> kv_heads,
                                  std::optional<Index> head_dim, std::optional<Index> element_bytes,
                                  const std::vector<Index>& window, const std::vector<Index>& image,
                                  Layers queries, Layers keys, Layers values, Layers attention) {
  auto arrays = std::make_shared<Arrays>();
  SequenceInfo& info = arrays->info;
  info.name = name;
  info.group = group.empty() ? name : group;
  info.payload = attention.empty() ? Payload::qkv : Payload::attention;
  const Layers& rows = attention.empty() ? queries : attention;
  if (rows.empty()) {
    throw TraceError("arrays: neither q nor attention has a layer; give q, k and v, or attention");
  }
  info.layers = static_cast<Index>(rows.size());
  info.query_heads = static_cast<Index>(rows.front().shape(0));
  info.tokens = static_cast<Index>(rows.front().shape(1));
  const Layers& heads = attention.empty() ? keys : values;
  if (!heads.empty()) {
    kv_heads = static_cast<Index>(heads.front().shape(0));
    head_dim = static_cast<Index>(heads.front().shape(2));
  }
  info.kv_heads = kv_heads.value_or(info.query_heads);
  info.head_dim = head_dim;
  info.element_bytes = element_bytes;
  info.prompt = prompt;
  info.generated = info.tokens - prompt + 1;
  info.scale = scale.value_or(head_dim ? 1.0 / std::sqrt(static_cast<double>(*head_dim)) : 1.0);
  info.has_values = !values.empty();
  info.image = image.empty() ? std::vector<Index>(at(info.tokens), -1) : image;
  info.masks.resize(window.empty() ? at(info.layers) : window.size());
  for (std::size_t layer = 0; layer < window.size(); ++layer) {
    info.masks[layer].window = window[layer];
  }
  info.prompt_rows.resize(at(std::max<Index>(prompt, 0)));
  std::iota(info.prompt_rows.begin(), info.prompt_rows.end(), Index{0});
  check_info(info, "arrays");
  if (attention.empty()) {
    expect_layers(keys, "k", info.layers);
    expect_shape(queries, "q", {info.query_heads, info.tokens, *head_dim});
    expect_shape(keys, "k", {info.kv_heads, info.tokens, *head_dim});
  } else {
    expect_shape(attention, "attention", {info.query_heads, info.tokens, info.tokens});
  }
  if (info.has_values) {
    expect_layers(values, "v", info.layers);
    expect_shape(values, "v", {info.kv_heads, info.tokens, *head_dim});
  }
  arrays->queries = std::move(queries);
  arrays->keys = std::move(keys);
  arrays->values = std::move(values);
  arrays->attention = std::move(attention);
  return {std::make_shared<ArrayTrace>(std::move(arrays)), 0, ""};
}

Index checked_layer(const SequenceInfo& info, Index layer) {
  if (layer < 0 || layer >= info.layers) {
    throw nb::index_error(("layer " + std::to_string(layer) + " of " + std::to_string(info.layers)).c_str());
  }
  return layer;
}

/// K or V of a layer: a view of the file where it is mapped.
nb::object key_value_array(const SequenceHandle& handle, Index layer,
                           View<const float, 3> (LayerPayload::*read)()) {
  std::shared_ptr<LayerPayload> payload = handle.sequence().layer(checked_layer(handle.info(), layer));
  const bool stored =
      read == &LayerPayload::keys ? handle.info().payload == Payload::qkv : handle.info().has_values;
  const View<const float, 3> numbers = stored ? ((*payload).*read)() : View<const float, 3>();
  if (!stored) {
    return nb::none();
  }
  auto* owned = new std::shared_ptr<LayerPayload>(std::move(payload));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::shared_ptr<LayerPayload>*>(p); });
  return array_of(numbers.data(), {at(numbers.extent(0)), at(numbers.extent(1)), at(numbers.extent(2))},
                  owner);
}

nb::object query_array(const SequenceHandle& handle, Index layer) {
  const SequenceInfo& info = handle.info();
  if (info.payload != Payload::qkv) {
    return nb::none();
  }
  const std::unique_ptr<LayerPayload> payload = handle.sequence().layer(checked_layer(info, layer));
  std::vector<float> out(at(info.query_heads * info.tokens * *info.head_dim));
  payload->read_queries({0, info.tokens}, {out.data(), {info.query_heads, info.tokens, *info.head_dim}});
  return array_of(std::move(out), {at(info.query_heads), at(info.tokens), at(*info.head_dim)});
}

/// Full-cache attention a = w / Σw of every stored row, by the canonical arithmetic.
nb::object attention_array(const SequenceHandle& handle, Index layer) {
  const SequenceInfo& info = handle.info();
  const std::unique_ptr<LayerPayload> payload = handle.sequence().layer(checked_layer(info, layer));
  std::vector<float> out(at(info.query_heads * info.tokens * info.tokens), 0.0f);
  {
    const nb::gil_scoped_release released;
    LayerWeights weights(info, layer, info.tokens, *payload, NanRule::error,
                         handle.trace().name() + ": sequence '" + info.name + "'");
    WeightBlock block;
    const auto store = [&] {
      for (Index h = 0; h < info.query_heads; ++h) {
        for (Index r = 0; r < block.rows(); ++r) {
          float* row = out.data() + (h * info.tokens + block.queries[at(r)]) * info.tokens;
          for (Index j = 0; j < std::min(info.tokens, block.stride) && block.sum(h, r) > 0.0f; ++j) {
            row[j] = block.row(h, r)[j] / block.sum(h, r);
          }
        }
      }
    };
    constexpr Index kRows = 32;
    const auto prompt_rows = static_cast<Index>(info.prompt_rows.size());
    for (Index begin = 0; begin < prompt_rows; begin += kRows) {
      weights.prompt({begin, std::min(prompt_rows, begin + kRows)}, block);
      store();
    }
    for (Index begin = 1; begin <= info.steps(); begin += kRows) {
      weights.decode({begin, std::min(info.steps() + 1, begin + kRows)}, block);
      store();
    }
  }
  return array_of(std::move(out), {at(info.query_heads), at(info.tokens), at(info.tokens)});
}

std::vector<std::string> check_file(const std::string& path, Index most) {
  const nb::gil_scoped_release released;
  traces::TraceFile file(path);
  return traces::check_trace(file, most).violations;
}

/// One head after another, so that one head is all that is held.
void write_sequence(traces::TraceWriter& writer, const SequenceHandle& handle, traces::FloatType type) {
  using traces::LayerArray;
  SequenceInfo info = handle.info();
  traces::SequenceDetails details;
  if (const auto* file = dynamic_cast<const traces::TraceFile*>(&handle.trace())) {
    details = file->details(handle.index());
  }
  writer.begin_sequence(info, details, type);
  for (Index layer = 0; layer < info.layers; ++layer) {
    const std::unique_ptr<LayerPayload> payload = handle.sequence().layer(layer);
    const auto write_heads = [&](LayerArray array, const View<const float, 3>& numbers) {
      for (Index h = 0; h < numbers.extent(0); ++h) {
        writer.write_head(layer, array, h, {numbers[h].data(), at(numbers[h].size())});
      }
    };
    std::vector<float> rows;
    if (info.payload == Payload::qkv) {
      rows.resize(at(info.query_heads * info.tokens * *info.head_dim));
      const View<float, 3> queries{rows.data(), {info.query_heads, info.tokens, *info.head_dim}};
      payload->read_queries({0, info.tokens}, queries);
      write_heads(LayerArray::queries, queries);
      write_heads(LayerArray::keys, payload->keys());
    } else {
      const auto stored = static_cast<Index>(info.prompt_rows.size());
      rows.resize(at(info.query_heads * stored * info.prompt));
      const View<float, 3> prompt{rows.data(), {info.query_heads, stored, info.prompt}};
      payload->read_prompt_attention({0, stored}, prompt);
      write_heads(LayerArray::prompt, prompt);
      std::vector<std::vector<float>> decode(at(info.query_heads));
      for (Index step = 1; step <= info.steps(); ++step) {
        const Index keys = info.prompt + step;
        rows.resize(at(info.query_heads * keys));
        payload->read_decode_attention(step, {rows.data(), {info.query_heads, keys}});
        for (Index h = 0; h < info.query_heads; ++h) {
          decode[at(h)].insert(decode[at(h)].end(), rows.begin() + h * keys, rows.begin() + (h + 1) * keys);
        }
      }
      for (Index h = 0; h < info.query_heads && info.steps() > 0; ++h) {
        writer.write_head(layer, LayerArray::decode, h, decode[at(h)]);
      }
    }
    if (info.has_values) {
      write_heads(LayerArray::values, payload->values());
    }
  }
}

void write_file(const std::string& path, const std::vector<const SequenceHandle*>& sequences,
                const std::string& type, const std::string& recorder, const std::string& libraries,
                const std::string& command) {
  static const std::map<std::string, traces::FloatType> kTypes = {{"float32", traces::FloatType::float32},
                                                                  {"float16", traces::FloatType::float16},
                                                                  {"bfloat16", traces::FloatType::bfloat16}};
  const auto found = kTypes.find(type);
  if (found == kTypes.end()) {
    throw ConfigError("dtype " + type + ": expected float32, float16 or bfloat16");
  }
  const nb::gil_scoped_release released;
  traces::TraceWriter writer(path, {recorder, libraries, command});
  for (const SequenceHandle* sequence : sequences) {
    write_sequence(writer, *sequence, found->second);
  }
  writer.finish();
}

/// An open file; its sequences are opened when they are asked for.
struct TraceHandle {
  std::shared_ptr<traces::TraceFile> file;
  std::string path;

  [[nodiscard]] SequenceHandle sequence(Index index) const {
    const Index count = file->sequences();
    if (index < -count || index >= count) {
      throw nb::index_error(
          (path + ": sequence " + std::to_string(index) + " of " + std::to_string(count)).c_str());
    }
    return {file, index < 0 ? index + count : index, path};
  }

  [[nodiscard]] SequenceHandle sequence_named(const std::string& name) const {
    const std::vector<std::string>& names = file->sequence_names();
    const auto found = std::ranges::find(names, name);
    if (found == names.end()) {
      throw nb::key_error((path + ": no sequence is named '" + name + "'").c_str());
    }
    return {file, found - names.begin(), path};
  }
};

std::vector<Index> windows_of(const SequenceInfo& info) {
  std::vector<Index> windows;
  for (const MaskRule& rule : info.masks) {
    windows.push_back(rule.window);
  }
  return windows;
}

}  // namespace

void bind_sequences(nb::module_& m) {
  nb::class_<SequenceInfo>(m, "SequenceInfo",
                           "What is known of a sequence before its payload is read. T = tokens, P = prompt.")
      .def_ro("name", &SequenceInfo::name)
      .def_ro("group", &SequenceInfo::group, "Sequences that share it are not independent.")
      .def_prop_ro("payload",
                   [](const SequenceInfo& i) { return i.payload == Payload::qkv ? "qkv" : "attention"; })
      .def_ro("layers", &SequenceInfo::layers)
      .def_ro("query_heads", &SequenceInfo::query_heads)
      .def_ro("kv_heads", &SequenceInfo::kv_heads)
      .def_ro("head_dim", &SequenceInfo::head_dim)
      .def_ro("element_bytes", &SequenceInfo::element_bytes, "Bytes of one cached number.")
      .def_ro("tokens", &SequenceInfo::tokens)
      .def_ro("prompt", &SequenceInfo::prompt)
      .def_ro("generated", &SequenceInfo::generated)
      .def_prop_ro("steps", &SequenceInfo::steps, "Decode steps: T - P.")
      .def_ro("scale", &SequenceInfo::scale, "logit = scale * q . k")
      .def_ro("has_values", &SequenceInfo::has_values)
      .def_prop_ro(
          "image", [](const SequenceInfo& i) { return array_of(i.image); },
          "[T] picture of the token, -1 for text.")
      .def_prop_ro(
          "window", [](const SequenceInfo& i) { return array_of(windows_of(i)); },
          "[layers] sliding window; 0: none.")
      .def_prop_ro(
          "prompt_rows", [](const SequenceInfo& i) { return array_of(i.prompt_rows); },
          "Prompt rows that the trace has, ascending.");

  nb::class_<SequenceHandle>(m, "Sequence", "One recorded generation, of a file or of arrays.")
      .def_prop_ro("info", &SequenceHandle::info, nb::rv_policy::reference_internal)
      .def_prop_ro("path", &SequenceHandle::path, "Of the trace file; empty for arrays in memory.")
      .def_prop_ro("index", &SequenceHandle::index, "In its trace.")
      .def(
          "keys",
          [](const SequenceHandle& s, Index layer) { return key_value_array(s, layer, &LayerPayload::keys); },
          nb::arg("layer"),
          "K after rotary embedding [kv_heads, T, head_dim], a view where the file is mapped; None in an "
          "attention payload.")
      .def(
          "values",
          [](const SequenceHandle& s, Index layer) {
            return key_value_array(s, layer, &LayerPayload::values);
          },
          nb::arg("layer"),
          "V [kv_heads, T, head_dim], a view where the file is mapped; None when the trace has none.")
      .def("queries", &query_array, nb::arg("layer"),
           "Q after rotary embedding [query_heads, T, head_dim]; None in an attention payload.")
      .def(
          "attention", &attention_array, nb::arg("layer"),
          "Full-cache attention [query_heads, T, T], row i over keys j, float32: w / sum(w) by the canonical "
          "arithmetic. Rows that the trace lacks and masked rows are 0.")
      .def("__repr__", [](const SequenceHandle& s) {
        return "<hae.Sequence '" + s.info().name + "': " + std::to_string(s.info().prompt) +
               " prompt tokens, " + std::to_string(s.info().steps()) + " decode steps, " +
               std::to_string(s.info().layers) + " layers>";
      });

  nb::class_<TraceHandle>(m, "Trace", "A trace file: a sequence of `Sequence`, by index or by name.")
      .def_ro("path", &TraceHandle::path)
      .def_prop_ro(
          "names", [](const TraceHandle& t) { return t.file->sequence_names(); },
          "Names of the sequences, in order.")
      .def("__len__", [](const TraceHandle& t) { return t.file->sequences(); })
      .def("__getitem__", &TraceHandle::sequence, nb::arg("index"))
      .def("__getitem__", &TraceHandle::sequence_named, nb::arg("name"))
      .def("__repr__", [](const TraceHandle& t) {
        return "<hae.Trace '" + t.path + "': " + std::to_string(t.file->sequences()) + " sequences>";
      });

  m.def(
      "open_trace",
      [](const std::string& path, bool lock) {
        return TraceHandle{std::make_shared<traces::TraceFile>(path, traces::OpenOptions{.lock = lock}),
                           path};
      },
      nb::arg("path"), nb::arg("lock") = true);
  m.def("sequence_of_arrays", &sequence_of_arrays, nb::arg("name"), nb::arg("group"), nb::arg("prompt"),
        nb::arg("scale").none(), nb::arg("kv_heads").none(), nb::arg("head_dim").none(),
        nb::arg("element_bytes").none(), nb::arg("window"), nb::arg("image"), nb::arg("q"), nb::arg("k"),
        nb::arg("v"), nb::arg("attention"));
  m.def("check_file", &check_file, nb::arg("path"), nb::arg("most"));
  m.def("write_file", &write_file, nb::arg("path"), nb::arg("sequences"), nb::arg("dtype"),
        nb::arg("recorder"), nb::arg("libraries"), nb::arg("command"));
}

}  // namespace hae::python
