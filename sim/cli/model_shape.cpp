#include "sim/cli/model_shape.hpp"

#include <algorithm>
#include <array>

namespace hae::cli {
namespace {

constexpr std::array kShapes = {
    ModelShape{
        "llava-1.5-7b", {32, 32, 128}, "llava-hf/llava-1.5-7b-hf, text_config: that of Vicuna 7B v1.5"},
    ModelShape{
        "llava-1.5-13b", {40, 40, 128}, "llava-hf/llava-1.5-13b-hf, text_config: that of Vicuna 13B v1.5"},
    ModelShape{
        "phi-3.5-vision", {32, 32, 96}, "microsoft/Phi-3.5-vision-instruct, hidden_size 3072 in 32 heads"},
    ModelShape{"qwen2-vl-7b", {28, 4, 128}, "Qwen/Qwen2-VL-7B-Instruct, num_key_value_heads 4"},
};

}  // namespace

std::span<const ModelShape> model_shapes() {
  return kShapes;
}

const ModelShape& model_shape(const std::string& name) {
  const auto found = std::ranges::find(kShapes, name, [](const ModelShape& model) { return model.name; });
  if (found != kShapes.end()) {
    return *found;
  }
  std::string known;
  for (const ModelShape& model : kShapes) {
    known += (known.empty() ? "" : ", ") + std::string(model.name);
  }
  throw ConfigError("--model: '" + name + "' is not in the table; expected one of " + known +
                    ", or give --layers, --kv-heads and --head-dim");
}

}  // namespace hae::cli
