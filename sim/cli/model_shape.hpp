#pragma once

#include <span>
#include <string>

#include "sim/view.hpp"

namespace hae::cli {

/// What decides how many bytes a KV cache takes.
struct CacheShape {
  Index layers = 0;
  Index kv_heads = 0;
  Index head_dim = 0;
  Index element_bytes = 2;  ///< of one cached number: 2 for float16 and bfloat16

  /// K and V of one token in every layer and KV head: 2 * layers * kv_heads * head_dim * element bytes.
  [[nodiscard]] Index token_bytes() const { return 2 * layers * kv_heads * head_dim * element_bytes; }
};

/// The cache of a published model's language part.
struct ModelShape {
  const char* name;
  CacheShape shape;
  const char* source;  ///< the configuration the numbers stand in
};

std::span<const ModelShape> model_shapes();

/// throws  ConfigError that lists the known names
const ModelShape& model_shape(const std::string& name);

}  // namespace hae::cli
