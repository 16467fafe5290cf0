#include "sim/trace.hpp"

#include <cmath>

#include "sim/text.hpp"

namespace hae {
namespace {

std::string count(Index n) {
  return std::to_string(n);
}

}  // namespace

void check_info(const SequenceInfo& info, const std::string& where) {
  const auto require = [&](bool holds, const std::string& message) {
    if (!holds) {
      throw TraceError(where + ": " + message + "; correct what was written, or record it again");
    }
  };
  require(info.layers >= 1, "layers is " + count(info.layers) + ", expected at least 1");
  require(info.query_heads >= 1, "query_heads is " + count(info.query_heads) + ", expected at least 1");
  require(info.kv_heads >= 1, "kv_heads is " + count(info.kv_heads) + ", expected at least 1");
  require(info.query_heads % info.kv_heads == 0,
          count(info.query_heads) + " query heads do not divide by " + count(info.kv_heads) + " KV heads");
  require(info.tokens >= 1, "tokens is " + count(info.tokens) + ", expected at least 1");
  require(info.prompt >= 1 && info.prompt <= info.tokens,
          "prompt is " + count(info.prompt) + ", expected 1 to tokens = " + count(info.tokens));
  require(!info.head_dim || *info.head_dim >= 1,
          "head_dim is " + count(info.head_dim.value_or(0)) + ", expected at least 1");
  require(info.payload == Payload::attention || info.head_dim.has_value(), "a qkv payload needs head_dim");
  require(!info.has_values || info.head_dim.has_value(), "values need head_dim");
  require(std::isfinite(info.scale), "scale is " + shortest(info.scale) + ", expected a finite number");
  require(static_cast<Index>(info.image.size()) == info.tokens,
          "image has " + count(static_cast<Index>(info.image.size())) +
              " entries, expected tokens = " + count(info.tokens));
  require(static_cast<Index>(info.masks.size()) == info.layers,
          "the mask rules cover " + count(static_cast<Index>(info.masks.size())) +
              " layers, expected layers = " + count(info.layers));
  for (const MaskRule& rule : info.masks) {
    require(rule.window >= 0, "a window is " + count(rule.window) + ", expected 0 (none) or more");
  }
  for (std::size_t r = 0; r < info.prompt_rows.size(); ++r) {
    require(info.prompt_rows[r] >= (r == 0 ? 0 : info.prompt_rows[r - 1] + 1) &&
                info.prompt_rows[r] < info.prompt,
            "prompt_rows[" + std::to_string(r) + "] is " + count(info.prompt_rows[r]) +
                ", expected ascending positions below prompt = " + count(info.prompt));
  }
  require(info.payload == Payload::attention || info.has_all_prompt_rows(),
          "a qkv payload has every prompt row, but prompt_rows lists " +
              count(static_cast<Index>(info.prompt_rows.size())));
}

}  // namespace hae
