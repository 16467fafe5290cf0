#include "tests/golden/cases.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <span>

#include "testing/stream.hpp"
#include "traces/float16.hpp"

namespace hae::testing {
namespace {

using Bidirectional = MaskRule::Bidirectional;
using traces::FloatType;

constexpr Index kLayers = 2;

struct Design {
  const char* name;
  Payload payload = Payload::qkv;
  FloatType type = FloatType::float32;
  Index query_heads = 4;
  Index kv_heads = 2;
  Index head_dim = 16;
  Index prompt = 48;
  Index tokens = 97;
  MaskRule mask = {};
  float size = 3.0f;       ///< of q and k: logits vary by about size^2 / 3
  bool subnormal = false;  ///< attention: three of four probabilities are below 2^-126
};

/// Two pictures with text before, and after them.
std::vector<Index> place_pictures(Index prompt, Index tokens) {
  std::vector<Index> image(static_cast<std::size_t>(tokens), -1);
  std::fill(image.begin() + prompt / 6, image.begin() + prompt / 2, 0);
  std::fill(image.begin() + prompt / 2, image.begin() + prompt * 5 / 6, 1);
  return image;
}

SequenceInfo describe(const Design& design) {
  SequenceInfo info;
  info.name = design.name;
  info.group = design.name;
  info.payload = design.payload;
  info.layers = kLayers;
  info.query_heads = design.query_heads;
  info.kv_heads = design.kv_heads;
  info.head_dim = design.head_dim;
  info.element_bytes = traces::bytes_of(design.type);
  info.tokens = design.tokens;
  info.prompt = design.prompt;
  info.generated = info.steps() + 1;
  info.scale = 1.0 / std::sqrt(static_cast<double>(design.head_dim));
  info.has_values = true;
  info.row_sum_tolerance = traces::row_sum_tolerance(design.type);
  info.masks.assign(static_cast<std::size_t>(kLayers), design.mask);
  info.image = place_pictures(design.prompt, design.tokens);
  info.prompt_rows.resize(static_cast<std::size_t>(design.prompt));
  std::iota(info.prompt_rows.begin(), info.prompt_rows.end(), 0);
  return info;
}

/// Rounds numbers to those that a file of this type can hold.
void round_to(FloatType type, std::span<float> numbers) {
  std::vector<std::byte> codes(numbers.size() * static_cast<std::size_t>(traces::bytes_of(type)));
  traces::encode(type, numbers, codes);
  traces::decode(type, false, codes, numbers);
}

std::vector<float> noise(const Design& design, Index heads, float size, Stream& stream) {
  std::vector<float> numbers(static_cast<std::size_t>(heads * design.tokens * design.head_dim));
  std::ranges::generate(numbers, [&] { return size * stream.signed_unit(); });
  round_to(design.type, numbers);
  return numbers;
}

/// Probabilities of `keys` keys, as a softmax leaves them: they add up to 1 within rounding.
void fill_row(const Design& design, std::span<float> row, Stream& stream) {
  if (design.subnormal) {
    std::ranges::generate(row, [&] {
      return stream.below(4) == 0 ? stream.unit() : static_cast<float>(stream.below(1 << 23)) * 0x1p-149f;
    });
  } else {
    std::ranges::generate(row, [&] { return stream.unit() * stream.unit(); });
  }
  row.front() += 0x1p-10f;
  const double sum = std::accumulate(row.begin(), row.end(), 0.0);
  for (float& weight : row) {
    weight = weight < 0x1p-126f ? weight : static_cast<float>(static_cast<double>(weight) / sum);
  }
  round_to(design.type, row);
}

std::vector<float> probabilities(const Design& design, Stream& stream) {
  const auto tokens = static_cast<std::size_t>(design.tokens);
  std::vector<float> matrix(static_cast<std::size_t>(design.query_heads) * tokens * tokens, 0.0f);
  for (std::size_t row = 0; row < static_cast<std::size_t>(design.query_heads) * tokens; ++row) {
    fill_row(design, std::span(matrix).subspan(row * tokens, row % tokens + 1), stream);
  }
  return matrix;
}

MemoryTrace make_trace(const Design& design, std::uint64_t seed) {
  MemoryTrace trace;
  trace.info = describe(design);
  Stream stream(seed);
  for (Index layer = 0; layer < kLayers; ++layer) {
    if (design.payload == Payload::attention) {
      trace.attention.push_back(probabilities(design, stream));
    } else {
      trace.queries.push_back(noise(design, design.query_heads, design.size, stream));
      trace.keys.push_back(noise(design, design.kv_heads, design.size, stream));
    }
    trace.values.push_back(noise(design, design.kv_heads, 1.0f, stream));
  }
  return trace;
}

const std::vector<Design>& designs() {
  static const std::vector<Design> all = {
      {.name = "head-dim-1", .head_dim = 1},
      {.name = "head-dim-2", .head_dim = 2},
      {.name = "head-dim-3", .head_dim = 3},
      {.name = "head-dim-15", .head_dim = 15},
      {.name = "head-dim-33", .head_dim = 33},
      {.name = "head-dim-64", .head_dim = 64},
      {.name = "head-dim-128", .head_dim = 128},
      {.name = "head-dim-130", .head_dim = 130},
      {.name = "float16", .type = FloatType::float16},
      {.name = "bfloat16", .type = FloatType::bfloat16},
      {.name = "one-head", .query_heads = 1, .kv_heads = 1},
      {.name = "no-groups", .query_heads = 4, .kv_heads = 4},
      {.name = "groups-of-five", .query_heads = 10, .kv_heads = 2},
      {.name = "window-1", .mask = {.window = 1}},
      {.name = "window-33", .mask = {.window = 33}},
      {.name = "picture-sees-itself", .mask = {.bidirectional = Bidirectional::image}},
      {.name = "picture-in-window", .mask = {.window = 9, .bidirectional = Bidirectional::image_in_window}},
      {.name = "weights-underflow", .size = 18.0f},
      {.name = "equal-weights", .size = 0.0f},
      {.name = "attention", .payload = Payload::attention},
      {.name = "attention-float16", .payload = Payload::attention, .type = FloatType::float16},
      {.name = "attention-bfloat16", .payload = Payload::attention, .type = FloatType::bfloat16},
      {.name = "attention-subnormal", .payload = Payload::attention, .subnormal = true},
      {.name = "two-blocks-of-rows", .prompt = 130, .tokens = 260},
      {.name = "one-prompt-token", .prompt = 1, .tokens = 65},
      {.name = "no-decode-steps", .prompt = 64, .tokens = 64},
      {.name = "one-token", .prompt = 1, .tokens = 1},
  };
  return all;
}

}  // namespace

std::vector<GoldenCase> golden_cases() {
  std::vector<GoldenCase> cases;
  for (const Design& design : designs()) {
    cases.push_back({design.name, make_trace(design, cases.size())});
  }
  return cases;
}

}  // namespace hae::testing
