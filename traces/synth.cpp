#include "traces/synth.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <vector>

#include "sim/errors.hpp"
#include "sim/trace.hpp"
#include "traces/layout.hpp"
#include "traces/message.hpp"
#include "traces/trace_writer.hpp"

namespace hae::traces {
namespace {

constexpr float kLn2 = 0.693147181F;
constexpr Index kSinks = 4;
constexpr std::uint64_t kHeavyHitterOneIn = 64;
constexpr std::uint64_t kSalientOneIn = 16;
constexpr float kDecayPerToken = 0.05F;

struct Kind {
  const char* name;
  float logit_noise;
};

/// In the order of SynthKind.
constexpr std::array<Kind, 6> kKinds{{{"sinks", 0.5F},
                                      {"heavy-hitters", 0.5F},
                                      {"image-sparse", 0.5F},
                                      {"uniform", 0.02F},
                                      {"all-ties", 0.0F},
                                      {"decaying", 0.5F}}};

const Kind& properties(SynthKind kind) {
  return kKinds[static_cast<std::size_t>(kind)];
}

/// The output function of splitmix64 (Steele, Lea, Flood 2014).
std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

/// What random numbers are for: the same place in a trace has an independent stream for each.
enum class Purpose : std::uint64_t { queries, keys, values, heavy_hitter, salient };

/// Random numbers of one place, addressed by a counter: their order of use does not matter.
class Stream {
 public:
  Stream(std::uint64_t seed, Purpose purpose, std::initializer_list<Index> place)
      : key_(mix(mix(seed) ^ static_cast<std::uint64_t>(purpose))) {
    for (const Index index : place) {
      key_ = mix(key_ ^ static_cast<std::uint64_t>(index));
    }
  }

  [[nodiscard]] std::uint64_t bits(Index counter) const {
    return mix(key_ ^ static_cast<std::uint64_t>(counter));
  }

  /// Nearly normal, mean 0, variance 1, within +-3.47: the sum of four uniform 16-bit integers, which is
  /// exact, then one multiplication. No library function is involved whose bits differ between machines.
  [[nodiscard]] float normal(Index counter) const {
    const std::uint64_t random = bits(counter);
    std::int32_t sum = -131070;  // 4 * 65535 / 2
    for (int part = 0; part < 4; ++part) {
      sum += static_cast<std::int32_t>((random >> (16 * part)) & 0xFFFFu);
    }
    return static_cast<float>(sum) * 2.6428998e-05F;  // 1 / sqrt((65536^2 - 1) / 3)
  }

 private:
  std::uint64_t key_;
};

void require(bool holds, const std::string& what) {
  if (!holds) {
    throw ConfigError(what);
  }
}

void check_options(const SynthOptions& o) {
  const auto within = [](const char* key, Index value, Index most) {
    require(value >= 1 && value <= most, message("--", key, " is ", value, ", expected 1 .. ", most));
  };
  within("layers", o.layers, kMostNumbered);
  within("query-heads", o.query_heads, kMostHeads);
  within("kv-heads", o.kv_heads, kMostHeads);
  within("head-dim", o.head_dim, kMostDimensions);
  within("prompt", o.prompt, kMostTokens);
  within("tokens", o.tokens, kMostTokens);
  within("sequences", o.sequences, kMostNumbered);
  require(o.query_heads % o.kv_heads == 0,
          message("--query-heads is ", o.query_heads, ", expected a multiple of --kv-heads = ", o.kv_heads));
  require(o.tokens >= o.prompt,
          message("--tokens is ", o.tokens, ", expected at least --prompt = ", o.prompt));
  require(o.images >= 0, message("--images is ", o.images, ", expected 0 or more"));
  require(o.images == 0 || o.image_tokens >= 1,
          message("--image-tokens is ", o.image_tokens, ", expected at least 1"));
  require(o.images == 0 || o.image_tokens <= o.prompt / o.images,
          message("--images ", o.images, " of --image-tokens ", o.image_tokens,
                  " do not fit --prompt = ", o.prompt));
}

/// Pictures spread over the prompt; the text is cut into as many pieces plus one, the question last.
std::vector<Index> place_images(const SynthOptions& o) {
  const Index text = o.prompt - o.images * o.image_tokens;
  std::vector<Index> image;
  for (Index gap = 0; gap <= o.images; ++gap) {
    const Index words = text * (gap + 1) / (o.images + 1) - text * gap / (o.images + 1);
    image.insert(image.end(), static_cast<std::size_t>(words), -1);
    if (gap < o.images) {
      image.insert(image.end(), static_cast<std::size_t>(o.image_tokens), gap);
    }
  }
  image.resize(static_cast<std::size_t>(o.tokens), -1);
  return image;
}

SequenceInfo describe_sequence(const SynthOptions& o, Index sequence) {
  SequenceInfo info;
  info.name = message(properties(o.kind).name, "-", sequence);
  info.group = info.name;
  info.layers = o.layers;
  info.query_heads = o.query_heads;
  info.kv_heads = o.kv_heads;
  info.head_dim = o.head_dim;
  info.element_bytes = bytes_of(o.type);
  info.tokens = o.tokens;
  info.prompt = o.prompt;
  info.generated = info.steps() + 1;
  info.scale = 1.0 / std::sqrt(static_cast<double>(o.head_dim));
  info.has_values = true;
  info.masks.resize(static_cast<std::size_t>(o.layers));
  info.image = place_images(o);
  for (Index row = 0; row < o.prompt; ++row) {
    info.prompt_rows.push_back(row);
  }
  return info;
}

/// Makes the heads of one sequence.
class Generator {
 public:
  Generator(const SynthOptions& options, const SequenceInfo& info, Index sequence)
      : options_(options), info_(info), sequence_(sequence), noise_(properties(options.kind).logit_noise) {}

  void queries(Index layer, Index head, std::span<float> out) const {
    // Correctly rounded, like every operation here: the same bits everywhere.
    const auto inverse_scale = static_cast<float>(std::sqrt(static_cast<double>(options_.head_dim)));
    fill({options_.seed, Purpose::queries, {sequence_, layer, head}}, noise_, out);
    for (Index token = 0; token < options_.tokens; ++token) {
      out[static_cast<std::size_t>(token * options_.head_dim)] = inverse_scale;
    }
  }

  void keys(Index layer, Index head, std::span<float> out) const {
    fill({options_.seed, Purpose::keys, {sequence_, layer, head}}, noise_ == 0 ? 0.0F : 1.0F, out);
    for (Index token = 0; token < options_.tokens; ++token) {
      out[static_cast<std::size_t>(token * options_.head_dim)] = log_weight(layer, head, token);
    }
  }

  void values(Index layer, Index head, std::span<float> out) const {
    fill({options_.seed, Purpose::values, {sequence_, layer, head}}, 1.0F, out);
  }

 private:
  static void fill(const Stream& stream, float size, std::span<float> out) {
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = size * stream.normal(static_cast<Index>(i));
    }
  }

  /// ln of the weight of a token, before noise.
  [[nodiscard]] float log_weight(Index layer, Index head, Index token) const {
    switch (options_.kind) {
      case SynthKind::sinks: {
        // 2^bit_width(T) is above T, so four sinks of 4 times that outweigh all other tokens together.
        const auto width = static_cast<float>(std::bit_width(static_cast<std::uint64_t>(options_.tokens)));
        return token < kSinks ? kLn2 * (width + 2) : 0.0F;
      }
      case SynthKind::heavy_hitters: {
        const Stream stream(options_.seed, Purpose::heavy_hitter, {sequence_, layer, head});
        return stream.bits(token) % kHeavyHitterOneIn == 0 ? 8 * kLn2 : 0.0F;
      }
      case SynthKind::image_sparse: {
        // The same tokens in every layer, so that what layer 0 shows holds for the others.
        const Stream stream(options_.seed, Purpose::salient, {sequence_});
        return info_.is_visual(token) && stream.bits(token) % kSalientOneIn != 0 ? -9 * kLn2 : 0.0F;
      }
      case SynthKind::uniform:
      case SynthKind::all_ties:
        return 0.0F;
      case SynthKind::decaying:
        return kDecayPerToken * static_cast<float>(token);
    }
    return 0.0F;
  }

  const SynthOptions& options_;
  const SequenceInfo& info_;
  Index sequence_;
  float noise_;
};

void write_sequence(TraceWriter& writer, const SynthOptions& o, Index sequence) {
  const SequenceInfo info = describe_sequence(o, sequence);
  SequenceDetails details;
  details.model = "synthetic";
  writer.begin_sequence(info, details, o.type);
  const Generator generator(o, info, sequence);
  std::vector<float> head_values(static_cast<std::size_t>(o.tokens * o.head_dim));
  for (Index layer = 0; layer < o.layers; ++layer) {
    for (Index head = 0; head < o.query_heads; ++head) {
      generator.queries(layer, head, head_values);
      writer.write_head(layer, LayerArray::queries, head, head_values);
    }
    for (Index head = 0; head < o.kv_heads; ++head) {
      generator.keys(layer, head, head_values);
      writer.write_head(layer, LayerArray::keys, head, head_values);
      generator.values(layer, head, head_values);
      writer.write_head(layer, LayerArray::values, head, head_values);
    }
  }
}

std::string command_of(const SynthOptions& o) {
  return message("hae synth --kind ", properties(o.kind).name, " --layers ", o.layers, " --query-heads ",
                 o.query_heads, " --kv-heads ", o.kv_heads, " --head-dim ", o.head_dim, " --prompt ",
                 o.prompt, " --tokens ", o.tokens, " --images ", o.images, " --image-tokens ", o.image_tokens,
                 " --sequences ", o.sequences, " --seed ", o.seed, " --dtype ", name_of(o.type));
}

}  // namespace

const std::vector<std::string>& synth_kind_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Kind& kind : kKinds) {
      all.emplace_back(kind.name);
    }
    return all;
  }();
  return names;
}

SynthKind parse_synth_kind(std::string_view name) {
  const std::vector<std::string>& names = synth_kind_names();
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) {
    std::string allowed;
    for (const std::string& kind : names) {
      allowed += (allowed.empty() ? "" : ", ") + kind;
    }
    throw ConfigError(message("--kind is ", in_quotes(name), ", expected one of ", allowed));
  }
  return static_cast<SynthKind>(found - names.begin());
}

void write_synthetic_trace(const std::filesystem::path& path, const SynthOptions& options) {
  check_options(options);
  TraceWriter writer(path, {"hae synth", "", command_of(options)});
  for (Index sequence = 0; sequence < options.sequences; ++sequence) {
    write_sequence(writer, options, sequence);
  }
  writer.finish();
}

}  // namespace hae::traces
