#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "sim/view.hpp"
#include "traces/float16.hpp"

namespace hae::traces {

/// What the attention of a synthetic trace looks like.
enum class SynthKind {
  sinks,          ///< the first 4 tokens take at least two thirds of every row, as attention sinks do
  heavy_hitters,  ///< about 1 token in 64, at random in each layer and KV head, weighs 256 times an ordinary
                  ///< one
  image_sparse,   ///< 15 of 16 visual tokens weigh 1/400 of a text token; the rest weigh as much as text
  uniform,        ///< every key weighs the same within a few per cent
  all_ties,       ///< every key of a row weighs exactly the same: nothing but the tie rule decides
  decaying,       ///< a key's weight falls by 5 % with every position of distance
};

/// `sinks`, `heavy-hitters`, `image-sparse`, `uniform`, `all-ties`, `decaying`.
[[nodiscard]] const std::vector<std::string>& synth_kind_names();

/// The kind of this name. throws ConfigError
[[nodiscard]] SynthKind parse_synth_kind(std::string_view name);

/// Everything that decides the bytes of a synthetic trace.
struct SynthOptions {
  SynthKind kind = SynthKind::sinks;
  Index layers = 4;
  Index query_heads = 8;
  Index kv_heads = 2;
  Index head_dim = 64;
  Index prompt = 192;
  Index tokens = 256;
  Index images = 1;         ///< pictures, spread over the prompt with text between them
  Index image_tokens = 96;  ///< of each picture
  Index sequences = 1;
  std::uint64_t seed = 0;
  FloatType type = FloatType::float32;
};

/// Writes a synthetic trace with a qkv payload.
///
/// The first dimension of q is 1 / scale and that of k a token's weight, ln w; the others hold noise that
/// varies logits by about 0.5 (0.02 for `uniform`, 0 for `all_ties`). So a token's attention is its weight,
/// times noise, over the sum of the weights the query sees. V is noise of size 1. All numbers come from a
/// counter-based generator and from correctly rounded operations: the same options give the same bytes on
/// every machine. In 16 bits the numbers are rounded: `decaying` becomes steps once T exceeds a few hundred.
///
/// throws  ConfigError  options that contradict themselves;  OutputError  the file cannot be written
void write_synthetic_trace(const std::filesystem::path& path, const SynthOptions& options);

}  // namespace hae::traces
