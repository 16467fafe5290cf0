#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sim/cli/command.hpp"
#include "sim/cli/manifest.hpp"
#include "sim/cli/output_file.hpp"
#include "sim/errors.hpp"
#include "traces/attention_saver.hpp"
#include "traces/kvp.hpp"
#include "traces/npz.hpp"

namespace hae::cli {
namespace {

struct Options {
  std::string in;
  std::string from;
  std::string out;
  traces::SequenceArguments sequence;
  std::vector<std::string> images;
  traces::AttentionSaverOptions attention_saver;
  traces::KvpOptions kvp;
  bool text_only = false;
  bool no_lock = false;
};

/// `5:9` as the positions 5, 6, 7, 8.
std::optional<Range> parse_span(const std::string& text) {
  Range span;
  const char* const end = text.data() + text.size();
  const auto [colon, no_start] = std::from_chars(text.data(), end, span.begin);
  if (no_start != std::errc{} || colon == end || *colon != ':') {
    return std::nullopt;
  }
  const auto [last, no_end] = std::from_chars(colon + 1, end, span.end);
  return no_end == std::errc{} && last == end ? std::optional(span) : std::nullopt;
}

void import_npz(const Options& options) {
  const traces::SequenceArguments& sequence = options.sequence;
  traces::import_npz(options.in, options.out,
                     {.name = sequence.name, .group = sequence.group, .origin = sequence.origin});
}

void import_attention_saver(const Options& options) {
  traces::AttentionSaverOptions attention_saver = options.attention_saver;
  attention_saver.sequence = options.sequence;
  attention_saver.lock = !options.no_lock;
  traces::import_attention_saver(options.in, options.out, attention_saver);
}

void import_kvp(const Options& options) {
  traces::KvpOptions kvp = options.kvp;
  kvp.sequence = options.sequence;
  traces::import_kvp(options.in, options.out, kvp);
}

/// A format, and those of the options that not every format takes.
struct Importer {
  std::string_view name;
  bool says_all;  ///< what it holds says where the prompt ends and what is a picture
  std::vector<std::string> options;
  void (*run)(const Options&);
};

const std::array<Importer, 3>& importers() {
  static const std::array<Importer, 3> all{
      {{"npz", true, {}, import_npz},
       {"attention-saver",
        false,
        {"--prompt", "--image", "--text-only", "--batch", "--kv-heads", "--head-dim", "--no-lock"},
        import_attention_saver},
       {"kvp", false, {"--prompt", "--image", "--text-only", "--scale", "--window"}, import_kvp}}};
  return all;
}

/// Options that the format does not take, or must have.
void check_options(const CLI::App& command, const Importer& importer) {
  for (const Importer& other : importers()) {
    for (const std::string& option : other.options) {
      if (command.count(option) != 0 && std::ranges::count(importer.options, option) == 0) {
        throw ConfigError(fmt::format(
            "{} has no meaning with --from {}, which {}", option, importer.name,
            importer.says_all ? "says such things itself; allowed: --name, --group"
                              : fmt::format("takes {}, --name, --group", fmt::join(importer.options, ", "))));
      }
    }
  }
  if (importer.says_all) {
    return;
  }
  if (command.count("--prompt") == 0) {
    throw ConfigError(
        fmt::format("--prompt is missing: --from {} needs the number of prompt tokens", importer.name));
  }
  if ((command.count("--image") != 0) == (command.count("--text-only") != 0)) {
    throw ConfigError(fmt::format(
        "--from {} needs either --image START:END, once for each picture, or --text-only", importer.name));
  }
}

/// A trace written into a directory that is imported would become a part of it, or overwrite one.
void check_outside(const std::string& out, const std::string& in) {
  namespace fs = std::filesystem;
  std::error_code unknown;
  if (!fs::is_directory(in, unknown)) {
    return;
  }
  const fs::path inside = fs::weakly_canonical(out, unknown).lexically_relative(fs::canonical(in, unknown));
  if (!inside.empty() && *inside.begin() != "..") {
    throw ConfigError(fmt::format("'{}' lies in '{}', which is imported; choose another path", out, in));
  }
}

void run(const CLI::App& command_line, const Options& given) {
  const Importer& importer = *std::ranges::find(importers(), given.from, &Importer::name);
  check_options(command_line, importer);
  check_outputs({given.out}, {given.in});
  check_outside(given.out, given.in);
  Options options = given;
  for (const std::string& image : given.images) {
    options.sequence.images.push_back(*parse_span(image));
  }
  options.sequence.origin = {.recorder = "hae import", .libraries = "", .command = command()};
  importer.run(options);
  fmt::print("{}: imported from {}\n", options.out, options.in);
}

}  // namespace

void add_import(CLI::App& app) {
  const auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("import", "Make a trace of one sequence from another format");
  command->add_option("in", options->in, "File to import; for kvp a directory")->required();
  std::vector<std::string> names;
  for (const Importer& importer : importers()) {
    names.emplace_back(importer.name);
  }
  command->add_option("--from", options->from, "Its format")->required()->check(CLI::IsMember(names));
  command->add_option("--out", options->out, "Trace file to write")->required();
  command->add_option("--name", options->sequence.name, "Name of the sequence (default: that of IN)");
  command->add_option("--group", options->sequence.group,
                      "Sequences of one group are not independent (default: the name)");
  command->add_option("--prompt", options->sequence.prompt,
                      "attention-saver, kvp: how many of the tokens are the prompt");
  command
      ->add_option("--image", options->images,
                   "attention-saver, kvp: tokens START to END - 1 are a picture; once for each")
      ->type_name("START:END")
      ->allow_extra_args(false)
      ->check([](const std::string& text) {
        return parse_span(text) ? "" : "'" + text + "' is not START:END, two whole numbers";
      });
  command->add_flag("--text-only", options->text_only, "attention-saver, kvp: no token is a picture's");
  traces::AttentionSaverOptions& attention_saver = options->attention_saver;
  command->add_option("--batch", attention_saver.batch,
                      "attention-saver: which batch (default: the only one)");
  command->add_option("--kv-heads", attention_saver.kv_heads,
                      "attention-saver: KV heads of a layer (default: as many as query heads)");
  command->add_option("--head-dim", attention_saver.head_dim,
                      "attention-saver: size of one key (default: nothing is known in bytes)");
  command->add_flag("--no-lock", options->no_lock, "attention-saver: open the file without a lock");
  command->add_option("--scale", options->kvp.scale,
                      "kvp: logit = scale * q.k (default: 1 / square root of a key's size)");
  command->add_option("--window", options->kvp.window,
                      "kvp: a query sees no key that is W or more tokens before it (default: 0, sees all)");
  command->footer(
      "Examples:\n"
      "  hae import attention.npz --from npz --out trace.h5\n"
      "  hae import attention.h5 --from attention-saver --prompt 600 --image 5:581 --out trace.h5\n"
      "  hae import sample_0000001 --from kvp --prompt 600 --text-only --out trace.h5");
  command->callback([options, command] { run(*command, *options); });
}

}  // namespace hae::cli
