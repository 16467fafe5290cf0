#include "sim/closed_loop.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <numeric>

#include "python/engine/arrays.hpp"
#include "python/engine/choice.hpp"
#include "python/engine/module.hpp"
#include "python/engine/policy_argument.hpp"
#include "python/engine/run.hpp"

namespace hae::python {
namespace {

/// A closed loop and the policy that decides in it.
struct LoopHandle {
  std::shared_ptr<const Policy> policy;
  std::unique_ptr<ClosedLoop> loop;
};

LoopHandle make_loop(nb::handle policy, const std::string& name, Index layers, Index query_heads,
                     Index kv_heads, Index head_dim, Index prompt, Index tokens, double scale,
                     const std::vector<Index>& image, const std::optional<std::vector<Index>>& window,
                     std::optional<Index> element_bytes, const std::string& nan) {
  SequenceInfo info;
  info.name = name;
  info.group = name;
  info.layers = layers;
  info.query_heads = query_heads;
  info.kv_heads = kv_heads;
  info.head_dim = head_dim;
  info.element_bytes = element_bytes;
  info.tokens = tokens;
  info.prompt = prompt;
  info.generated = tokens - prompt + 1;
  info.scale = scale;
  info.has_values = true;
  info.masks.resize(at(std::max<Index>(layers, 0)));
  if (window) {
    info.masks.assign(window->size(), {});
    for (std::size_t layer = 0; layer < window->size(); ++layer) {
      info.masks[layer].window = (*window)[layer];
    }
  }
  info.image = image;
  info.image.resize(at(std::max<Index>(tokens, 0)), -1);
  info.prompt_rows.resize(at(std::max<Index>(prompt, 0)));
  std::iota(info.prompt_rows.begin(), info.prompt_rows.end(), Index{0});
  std::shared_ptr<const Policy> chosen = policy_argument(policy);
  auto loop = std::make_unique<ClosedLoop>(std::move(info), chosen, nan_rule(nan), "closed loop: " + name);
  return {std::move(chosen), std::move(loop)};
}

LayerRows rows_of(const FloatArray& q, const FloatArray& k, const FloatArray& v) {
  return {view(q), view(k), view(v)};
}

nb::typed<nb::list, NumpyArray<Index>> residents(const LoopHandle& handle, Index layer) {
  const LayerCache& cache = handle.loop->cache(layer);
  nb::list lanes;
  for (Index lane = 0; lane < cache.lanes(); ++lane) {
    lanes.append(residents_of(cache, lane));
  }
  return lanes;
}

RunHandle finish(LoopHandle& handle) {
  ClosedLoop::Finished finished = handle.loop->finish();
  cli::RunRecord record;
  record.info = std::move(finished.info);
  record.spec = handle.policy->spec();
  record.options = handle.policy->options();
  record.result = std::move(finished.result);
  return {std::move(record)};
}

}  // namespace

void bind_closed_loop(nb::module_& m) {
  nb::class_<LoopHandle>(
      m, "ClosedLoop",
      "One policy deciding while a model runs. The model tells each layer's new rows and evicts what "
      "was decided; hae.hf does that for transformers.")
      .def(
          "__init__",
          [](LoopHandle* self, nb::handle policy, const std::string& name, Index layers, Index query_heads,
             Index kv_heads, Index head_dim, Index prompt, Index tokens, double scale,
             const std::vector<Index>& image, const std::optional<std::vector<Index>>& window,
             std::optional<Index> element_bytes, const std::string& nan) {
            new (self) LoopHandle(make_loop(policy, name, layers, query_heads, kv_heads, head_dim, prompt,
                                            tokens, scale, image, window, element_bytes, nan));
          },
          nb::arg("policy"), nb::kw_only(), nb::arg("name"), nb::arg("layers"), nb::arg("query_heads"),
          nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("prompt"), nb::arg("tokens"), nb::arg("scale"),
          nb::arg("image"), nb::arg("window") = nb::none(), nb::arg("element_bytes") = 4,
          nb::arg("nan") = "error",
          "tokens: the most the sequence may grow to. image [prompt]: picture of the token, -1 for text. "
          "window "
          "[layers]: sliding window, 0 none.")
      .def_prop_ro(
          "lanes",
          [](const LoopHandle& h) { return h.policy->lanes() == LaneKind::layer ? "layer" : "kv_head"; })
      .def(
          "absent",
          [](const LoopHandle& h, Index layer) {
            const std::span<const Index> absent = h.loop->absent(layer);
            return array_of(std::vector<Index>(absent.begin(), absent.end()));
          },
          nb::arg("layer"),
          "Prompt positions that leave within the layer's prefill, ascending: they give no row and no key "
          "there. Known "
          "when the prefills of the layers before are over.")
      .def(
          "prefill",
          [](LoopHandle& h, Index layer, const FloatArray& q, const FloatArray& k, const FloatArray& v) {
            const nb::gil_scoped_release released;
            h.loop->prefill(layer, rows_of(q, k, v));
          },
          nb::arg("layer"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
          "A layer's prefill, layers ascending: q [query_heads, rows, head_dim], k and v [kv_heads, rows, "
          "head_dim], "
          "float32, after rotary embedding, of all prompt tokens that are not absent.")
      .def(
          "step",
          [](LoopHandle& h, Index layer, const FloatArray& q, const FloatArray& k, const FloatArray& v) {
            const nb::gil_scoped_release released;
            h.loop->step(layer, rows_of(q, k, v));
          },
          nb::arg("layer"), nb::arg("q"), nb::arg("k"), nb::arg("v"), "One decode step of a layer: one row.")
      .def(
          "changes", [](const LoopHandle& h, Index layer) { return h.loop->missing(layer); },
          nb::arg("layer"), "A number that grows when a token of the layer is evicted, and only then.")
      .def("residents", &residents, nb::arg("layer"),
           "Positions that each lane holds, ascending: one array a lane.")
      .def("finish", &finish, "Ends the loop: the run that it was.");
}

}  // namespace hae::python
