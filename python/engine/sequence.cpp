#include "python/engine/sequence.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "python/engine/choice.hpp"
#include "python/engine/interruptible.hpp"
#include "python/engine/module.hpp"
#include "python/engine/write_trace.hpp"
#include "sim/weights.hpp"
#include "traces/check.hpp"

namespace hae::python {
namespace {

/// throws  ConfigError for another word
traces::FloatType float_type(const std::string& name) {
  using traces::FloatType;
  return choose<FloatType>(
      name,
      {{"float32", FloatType::float32}, {"float16", FloatType::float16}, {"bfloat16", FloatType::bfloat16}},
      "dtype");
}

std::unique_ptr<LayerPayload> layer_of(const SequenceHandle& handle, Index layer) {
  if (layer < 0 || layer >= handle.info().layers) {
    throw nb::index_error(
        ("layer " + std::to_string(layer) + " of " + std::to_string(handle.info().layers)).c_str());
  }
  return handle.sequence().layer(layer);
}

using Layer = std::shared_ptr<LayerPayload>;

/// K or V of a layer: a view of the file where that is mapped, which the array keeps alive.
NumpyArray<const float> whole(const SequenceHandle& handle, Index index,
                              View<const float, 3> (LayerPayload::*read)()) {
  Layer layer;
  View<const float, 3> numbers;
  {
    const nb::gil_scoped_release released;
    layer = layer_of(handle, index);
    numbers = ((*layer).*read)();
  }
  return array_of(numbers.data(), {at(numbers.extent(0)), at(numbers.extent(1)), at(numbers.extent(2))},
                  owner_of(std::move(layer)));
}

std::optional<NumpyArray<const float>> keys(const SequenceHandle& handle, Index layer) {
  const bool stored = handle.info().payload == Payload::qkv;
  return stored ? std::optional(whole(handle, layer, &LayerPayload::keys)) : std::nullopt;
}

std::optional<NumpyArray<const float>> values(const SequenceHandle& handle, Index layer) {
  const bool stored = handle.info().has_values;
  return stored ? std::optional(whole(handle, layer, &LayerPayload::values)) : std::nullopt;
}

std::optional<NumpyArray<float>> queries(const SequenceHandle& handle, Index index) {
  const SequenceInfo& info = handle.info();
  if (info.payload != Payload::qkv) {
    return std::nullopt;
  }
  std::vector<float> out(at(info.query_heads * info.tokens * *info.head_dim));
  {
    const nb::gil_scoped_release released;
    layer_of(handle, index)
        ->read_queries({0, info.tokens}, {out.data(), {info.query_heads, info.tokens, *info.head_dim}});
  }
  return array_of(std::move(out), {at(info.query_heads), at(info.tokens), at(*info.head_dim)});
}

/// Full-cache attention a = w / sum(w) of every stored row, by the canonical arithmetic.
class AttentionMatrix {
 public:
  AttentionMatrix(const SequenceHandle& handle, Index layer)
      : info_(handle.info()),
        payload_(layer_of(handle, layer)),
        weights_(info_, layer, info_.tokens, *payload_, NanRule::error, handle.where()),
        out_(at(info_.query_heads * info_.tokens * info_.tokens), 0.0f) {}

  std::vector<float> form() && {
    const auto prompt_rows = static_cast<Index>(info_.prompt_rows.size());
    for (Index begin = 0; begin < prompt_rows; begin += kRows) {
      weights_.prompt({begin, std::min(prompt_rows, begin + kRows)}, block_);
      store();
    }
    for (Index begin = 1; begin <= info_.steps(); begin += kRows) {
      weights_.decode({begin, std::min(info_.steps() + 1, begin + kRows)}, block_);
      store();
    }
    return std::move(out_);
  }

 private:
  static constexpr Index kRows = 32;  ///< formed at a time

  void store() {
    const Index keys = std::min(info_.tokens, block_.stride);
    for (Index h = 0; h < info_.query_heads; ++h) {
      for (Index r = 0; r < block_.rows(); ++r) {
        float* row = out_.data() + (h * info_.tokens + block_.queries[at(r)]) * info_.tokens;
        for (Index j = 0; j < keys && block_.sum(h, r) > 0.0f; ++j) {
          row[j] = block_.row(h, r)[j] / block_.sum(h, r);
        }
      }
    }
  }

  const SequenceInfo& info_;
  std::unique_ptr<LayerPayload> payload_;
  LayerWeights weights_;
  WeightBlock block_;
  std::vector<float> out_;
};

NumpyArray<float> attention(const SequenceHandle& handle, Index layer) {
  const SequenceInfo& info = handle.info();
  std::vector<float> matrix;
  {
    const nb::gil_scoped_release released;
    matrix = AttentionMatrix(handle, layer).form();
  }
  return array_of(std::move(matrix), {at(info.query_heads), at(info.tokens), at(info.tokens)});
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
    const nb::gil_scoped_release released;
    return {file, index < 0 ? index + count : index, path};
  }

  [[nodiscard]] SequenceHandle sequence_named(const std::string& name) const {
    const std::vector<std::string>& names = file->sequence_names();
    const auto found = std::ranges::find(names, name);
    if (found == names.end()) {
      throw nb::key_error((path + ": no sequence is named '" + name + "'").c_str());
    }
    return sequence(found - names.begin());
  }
};

TraceHandle open_trace(const std::string& path, bool lock) {
  const nb::gil_scoped_release released;
  return {std::make_shared<traces::TraceFile>(path, traces::OpenOptions{.lock = lock}), path};
}

SequenceHandle sequence_of_arrays(const std::string& name, const std::optional<std::string>& group,
                                  Index prompt, std::optional<double> scale, std::optional<Index> kv_heads,
                                  std::optional<Index> head_dim, Index element_bytes,
                                  const std::string& stored, const std::optional<std::vector<Index>>& window,
                                  const std::optional<std::vector<Index>>& image,
                                  const std::vector<std::string>& tokens, LayerArrays q, LayerArrays k,
                                  LayerArrays v, LayerArrays attention) {
  return SequenceHandle(
      std::make_shared<ArrayTrace>(Arrays{std::move(q), std::move(k), std::move(v), std::move(attention)},
                                   ArraysInfo{name, group, prompt, scale, kv_heads, head_dim, element_bytes,
                                              float_type(stored), window, image, tokens}));
}

std::vector<std::string> check_file(const std::string& path, Index most) {
  if (most < 0) {
    throw ConfigError("most is " + std::to_string(most) + "; allowed: 0 or more");
  }
  std::vector<std::string> violations;
  interruptible([&](const std::function<void()>& keep_going) {
    traces::TraceFile file(path);
    violations = traces::check_file(file, most, keep_going).violations;
  });
  return violations;
}

void write_file(const std::string& path, const std::vector<const SequenceHandle*>& sequences,
                const std::string& dtype, const std::string& recorder, const std::string& libraries,
                const std::string& command) {
  const traces::FloatType type = float_type(dtype);
  interruptible([&](const std::function<void()>& keep_going) {
    write_trace(path, sequences, type, {recorder, libraries, command}, keep_going);
  });
}

NumpyArray<Index> windows(const SequenceInfo& info) {
  std::vector<Index> windows;
  for (const MaskRule& rule : info.masks) {
    windows.push_back(rule.window);
  }
  return array_of(std::move(windows));
}

std::vector<const char*> bidirectional(const SequenceInfo& info) {
  std::vector<const char*> names;
  for (const MaskRule& rule : info.masks) {
    names.push_back(rule.bidirectional == MaskRule::Bidirectional::none    ? "none"
                    : rule.bidirectional == MaskRule::Bidirectional::image ? "image"
                                                                           : "image_in_window");
  }
  return names;
}

std::optional<NumpyArray<Index>> patches(const traces::SequenceDetails& details) {
  if (details.patch.empty()) {
    return std::nullopt;
  }
  std::vector<Index> flat;
  for (const std::array<Index, 2>& patch : details.patch) {
    flat.insert(flat.end(), patch.begin(), patch.end());
  }
  return array_of(std::move(flat), {details.patch.size(), 2});
}

std::optional<NumpyArray<Index>> optional_array(const std::vector<Index>& numbers) {
  return numbers.empty() ? std::nullopt : std::optional(array_of(numbers));
}

void bind_info(nb::module_& m) {
  constexpr auto kOwned = nb::rv_policy::reference;  // the arrays have an owner of their own
  nb::class_<SequenceInfo>(m, "SequenceInfo",
                           "What is known of a sequence before its payload is read. T = tokens, P = prompt.")
      .def_ro("name", &SequenceInfo::name)
      .def_ro("group", &SequenceInfo::group, "Sequences that share it are not independent.")
      .def_prop_ro(
          "payload", [](const SequenceInfo& i) { return i.payload == Payload::qkv ? "qkv" : "attention"; },
          "\"qkv\", from which attention is recomputed, or \"attention\", probabilities as recorded.")
      .def_ro("layers", &SequenceInfo::layers)
      .def_ro("query_heads", &SequenceInfo::query_heads)
      .def_ro("kv_heads", &SequenceInfo::kv_heads)
      .def_ro("head_dim", &SequenceInfo::head_dim, "None: nothing is known in bytes.")
      .def_ro("element_bytes", &SequenceInfo::element_bytes, "Bytes of one cached number.")
      .def_ro("tokens", &SequenceInfo::tokens, "T.")
      .def_ro("prompt", &SequenceInfo::prompt, "P, 1 <= P <= T.")
      .def_ro("generated", &SequenceInfo::generated, "Tokens that the model produced.")
      .def_prop_ro("steps", &SequenceInfo::steps, "Decode steps: T - P.")
      .def_ro("scale", &SequenceInfo::scale, "logit = scale * q . k")
      .def_ro("has_values", &SequenceInfo::has_values)
      .def_prop_ro(
          "image", [](const SequenceInfo& i) { return array_of(i.image); }, kOwned,
          "[T] picture of the token, -1 for text.")
      .def_prop_ro("window", &windows, kOwned, "[layers] sliding window; 0: none.")
      .def_prop_ro("bidirectional", &bidirectional,
                   "[layers] whether prompt tokens of one image see each other too: \"none\", \"image\", or "
                   "\"image_in_window\".")
      .def_prop_ro(
          "prompt_rows", [](const SequenceInfo& i) { return array_of(i.prompt_rows); }, kOwned,
          "Prompt rows that the trace has, ascending.");

  using Details = traces::SequenceDetails;
  nb::class_<Details>(m, "SequenceDetails", "What no replay needs. None or empty where the trace lacks it.")
      .def_ro("model", &Details::model)
      .def_ro("attention_implementation", &Details::attention_implementation)
      .def_ro("token", &Details::token, "[T] the tokens as text.")
      .def_prop_ro(
          "token_id", [](const Details& d) { return optional_array(d.token_id); }, kOwned, "[T]")
      .def_prop_ro("patch", &patches, kOwned, "[T, 2] row and column of the patch, -1 -1 for none.")
      .def_prop_ro(
          "frame", [](const Details& d) { return optional_array(d.frame); }, kOwned,
          "[T] frame of a video, -1 for text.");
}

void bind_sequence(nb::module_& m) {
  nb::class_<SequenceHandle>(m, "Sequence", "One recorded generation, of a file or of arrays.")
      .def_prop_ro("info", &SequenceHandle::info, nb::rv_policy::reference_internal)
      .def_prop_ro("path", &SequenceHandle::path, "Of the trace file; empty for arrays in memory.")
      .def_prop_ro("index", &SequenceHandle::index, "In its trace.")
      .def_prop_ro("details", &SequenceHandle::details, nb::call_guard<nb::gil_scoped_release>(),
                   "Tokens as text, patches, the model's name; read from the file anew each time.")
      .def("keys", &keys, nb::arg("layer"),
           "K after rotary embedding [kv_heads, T, head_dim], read-only; a view where the file is float32 "
           "and mapped, or the arrays are. None in an attention payload.")
      .def("values", &values, nb::arg("layer"), "V, like `keys`; None when the trace has none.")
      .def("queries", &queries, nb::arg("layer"),
           "Q after rotary embedding [query_heads, T, head_dim], a copy; None in an attention payload.")
      .def(
          "attention", &attention, nb::arg("layer"),
          "Full-cache attention [query_heads, T, T], row i over keys j, float32: w / sum(w) by the canonical "
          "arithmetic. Rows that the trace lacks and masked rows are 0.")
      .def("__repr__", [](const SequenceHandle& s) {
        return "<hae.Sequence '" + s.info().name + "': " + std::to_string(s.info().prompt) +
               " prompt tokens, " + std::to_string(s.info().steps()) + " decode steps, " +
               std::to_string(s.info().layers) + " layers>";
      });
}

void bind_trace(nb::module_& m) {
  nb::class_<TraceHandle>(m, "Trace",
                          "A trace file: a sequence of `Sequence`, by index or by name. It stays open, and "
                          "locked against writers, while it or anything of it lives.")
      .def_ro("path", &TraceHandle::path)
      .def_prop_ro(
          "names", [](const TraceHandle& t) { return t.file->sequence_names(); },
          "Names of the sequences, in order.")
      .def("__len__", [](const TraceHandle& t) { return t.file->sequences(); })
      .def("__getitem__", &TraceHandle::sequence, nb::arg("index"))
      .def("__getitem__", &TraceHandle::sequence_named, nb::arg("name"))
      .def(
          "__iter__", [](nb::handle self) { return nb::steal<nb::iterator>(PySeqIter_New(self.ptr())); },
          nb::sig("def __iter__(self) -> collections.abc.Iterator[Sequence]"))
      .def("__repr__", [](const TraceHandle& t) {
        return "<hae.Trace '" + t.path + "': " + std::to_string(t.file->sequences()) + " sequences>";
      });
}

}  // namespace

void bind_sequences(nb::module_& m) {
  bind_info(m);
  bind_sequence(m);
  bind_trace(m);
  m.def("open_trace", &open_trace, nb::arg("path"), nb::arg("lock"));
  m.def("sequence_of_arrays", &sequence_of_arrays, nb::kw_only(), nb::arg("name"), nb::arg("group").none(),
        nb::arg("prompt"), nb::arg("scale").none(), nb::arg("kv_heads").none(), nb::arg("head_dim").none(),
        nb::arg("element_bytes"), nb::arg("stored"), nb::arg("window").none(), nb::arg("image").none(),
        nb::arg("tokens"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("attention"));
  m.def("check_file", &check_file, nb::arg("path"), nb::arg("most"));
  m.def("write_file", &write_file, nb::arg("path"), nb::arg("sequences"), nb::arg("dtype"),
        nb::arg("recorder"), nb::arg("libraries"), nb::arg("command"));
}

}  // namespace hae::python
