#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "sim/cli/command.hpp"
#include "traces/synth.hpp"

namespace hae::cli {
namespace {

/// The whole text as an unsigned number: the option parser itself would take -1.
std::optional<std::uint64_t> parse_seed(const std::string& text) {
  std::uint64_t seed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  return error == std::errc{} && end == text.data() + text.size() ? std::optional(seed) : std::nullopt;
}

struct Options {
  traces::SynthOptions synth;
  std::string kind;
  std::string dtype = "float32";
  std::string out;
  std::string seed = "0";
  std::optional<Index> tokens;
  std::optional<Index> image_tokens;
};

void run(const Options& options) {
  traces::SynthOptions synth = options.synth;
  synth.kind = traces::parse_synth_kind(options.kind);
  synth.seed = *parse_seed(options.seed);
  // The defaults that depend on others, so that a prompt of any length needs no other option.
  synth.tokens = options.tokens.value_or(synth.prompt + 64);
  synth.image_tokens =
      options.image_tokens.value_or(std::max<Index>(1, synth.prompt / std::max<Index>(1, 2 * synth.images)));
  using traces::FloatType;
  for (const FloatType type : {FloatType::float32, FloatType::float16, FloatType::bfloat16}) {
    synth.type = options.dtype == traces::name_of(type) ? type : synth.type;
  }
  traces::write_synthetic_trace(options.out, synth);
  fmt::print("{}: {} sequence{} of {} tokens, kind {}, seed {}\n", options.out, synth.sequences,
             synth.sequences == 1 ? "" : "s", synth.tokens, options.kind, synth.seed);
}

}  // namespace

void add_synth(CLI::App& app) {
  const auto options = std::make_shared<Options>();
  traces::SynthOptions& synth = options->synth;
  CLI::App* command =
      app.add_subcommand("synth", "Write a seeded synthetic trace; equal options give equal bytes");
  command
      ->add_option("--kind", options->kind,
                   fmt::format("One of {}", fmt::join(traces::synth_kind_names(), ", ")))
      ->required();
  command->add_option("--out", options->out, "Trace file to write")->required();
  command->add_option("--layers", synth.layers, "Layers")->capture_default_str();
  command->add_option("--query-heads", synth.query_heads, "Query heads of a layer")->capture_default_str();
  command->add_option("--kv-heads", synth.kv_heads, "KV heads of a layer")->capture_default_str();
  command->add_option("--head-dim", synth.head_dim, "Size of one key")->capture_default_str();
  command->add_option("--prompt", synth.prompt, "Prompt tokens")->capture_default_str();
  command->add_option("--tokens", options->tokens,
                      "Tokens in all: prompt and decode steps (default: prompt + 64)");
  command->add_option("--images", synth.images, "Pictures in the prompt")->capture_default_str();
  command->add_option("--image-tokens", options->image_tokens,
                      "Tokens of each picture (default: half of the prompt, shared)");
  command->add_option("--sequences", synth.sequences, "Sequences")->capture_default_str();
  command->add_option("--seed", options->seed, "Seed, a whole number of 0 or more")
      ->check([](const std::string& text) {
        return parse_seed(text) ? "" : "'" + text + "' is not a whole number from 0 to 18446744073709551615";
      })
      ->capture_default_str();
  command->add_option("--dtype", options->dtype, "Type of the stored numbers")
      ->check(CLI::IsMember({"float32", "float16", "bfloat16"}))
      ->capture_default_str();
  command->footer(
      "Example:\n  hae synth --kind image-sparse --out synth.h5 --prompt 768 --tokens 1024 --images 1 "
      "--image-tokens 576");
  command->callback([options] { run(*options); });
}

}  // namespace hae::cli
