#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "sim/cli/command.hpp"
#include "traces/describe.hpp"

namespace hae::cli {
namespace {

using nlohmann::ordered_json;

struct Options {
  std::string trace;
  bool json = false;
  bool no_lock = false;
};

/// How a mask rule reads, `causal, window 4096`.
std::string name_of(const MaskRule& rule) {
  std::string words = "causal";
  if (rule.window > 0) {
    words += fmt::format(", window {}", rule.window);
  }
  if (rule.bidirectional == MaskRule::Bidirectional::image) {
    words += ", bidirectional in an image";
  } else if (rule.bidirectional == MaskRule::Bidirectional::image_in_window) {
    words += ", bidirectional in an image within the window";
  }
  return words;
}

const char* name_of(Payload payload) {
  return payload == Payload::qkv ? "qkv" : "attention";
}

template <typename Number>
ordered_json or_null(const std::optional<Number>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

ordered_json to_json(const traces::ImageSummary& image) {
  ordered_json spans = ordered_json::array();
  for (const Range& span : image.spans) {
    spans.push_back({span.begin, span.end});
  }
  return {{"image", image.image}, {"spans", spans}, {"tokens", image.tokens}, {"picture", image.has_picture}};
}

ordered_json to_json(const traces::StoredDataset& dataset) {
  return {{"path", dataset.path},
          {"type", dataset.type},
          {"shape", dataset.shape},
          {"chunk", dataset.chunk},
          {"filters", dataset.filters},
          {"declared_bytes", dataset.declared_bytes},
          {"stored_bytes", dataset.stored_bytes}};
}

ordered_json to_json(const traces::SequenceSummary& summary);

template <typename Items>
ordered_json list_to_json(const Items& items) {
  ordered_json list = ordered_json::array();
  for (const auto& item : items) {
    list.push_back(to_json(item));
  }
  return list;
}

ordered_json to_json(const traces::SequenceSummary& summary) {
  const SequenceInfo& info = summary.info;
  ordered_json masks = ordered_json::array();
  for (const MaskRule& rule : info.masks) {
    masks.push_back({{"window", rule.window}, {"bidirectional", static_cast<int>(rule.bidirectional)}});
  }
  return {{"name", info.name},
          {"group", info.group},
          {"payload", name_of(info.payload)},
          {"model", summary.model},
          {"attention_implementation", summary.attention_implementation},
          {"layers", info.layers},
          {"query_heads", info.query_heads},
          {"kv_heads", info.kv_heads},
          {"head_dim", or_null(info.head_dim)},
          {"element_bytes", or_null(info.element_bytes)},
          {"tokens", info.tokens},
          {"prompt", info.prompt},
          {"steps", info.steps()},
          {"generated", info.generated},
          {"prompt_rows", info.prompt_rows.size()},
          {"scale", info.scale},
          {"has_values", info.has_values},
          {"masks", masks},
          {"visual_tokens", summary.visual_tokens},
          {"text_tokens", summary.text_tokens},
          {"images", list_to_json(summary.images)},
          {"payload_bytes", summary.payload_bytes},
          {"cache_bytes", or_null(summary.cache_bytes)},
          {"datasets", list_to_json(summary.datasets)},
          {"lint", summary.lint}};
}

ordered_json to_json(const traces::TraceSummary& trace) {
  return {{"schema", "hae.info/1"},
          {"path", trace.path},
          {"format_version", traces::kFormatVersion},
          {"recorder", trace.origin.recorder},
          {"libraries", trace.origin.libraries},
          {"command", trace.origin.command},
          {"bytes", trace.bytes},
          {"sequences", list_to_json(trace.sequences)}};
}

std::string printable(const std::string& text) {
  std::string safe = text;
  for (char& letter : safe) {
    letter = static_cast<unsigned char>(letter) < 0x20 || letter == 0x7F ? '?' : letter;
  }
  return safe;
}

void print_datasets(const traces::SequenceSummary& summary) {
  for (const traces::StoredDataset& dataset : summary.datasets) {
    // All layers are alike: the first stands for them.
    if (dataset.path.starts_with("layers/") && !dataset.path.starts_with("layers/000000/")) {
      continue;
    }
    std::string storage =
        dataset.chunk.empty() ? "contiguous" : fmt::format("chunks [{}]", fmt::join(dataset.chunk, ", "));
    for (const std::string& filter : dataset.filters) {
      storage += ", " + filter;
    }
    fmt::print("  {:<26} {:<9} {:<22} {}\n", dataset.path, dataset.type,
               fmt::format("[{}]", fmt::join(dataset.shape, ", ")), storage);
  }
}

void print_images(const traces::SequenceSummary& summary) {
  fmt::print("  tokens       {} ({} prompt, {} decode steps), visual tokens: {}, text tokens: {}\n",
             summary.info.tokens, summary.info.prompt, summary.info.steps(), summary.visual_tokens,
             summary.text_tokens);
  for (const traces::ImageSummary& image : summary.images) {
    std::string spans;
    for (const Range& span : image.spans) {
      spans += fmt::format(" [{}, {})", span.begin, span.end);
    }
    fmt::print("  image {:<6} {} tokens at{}{}\n", image.image, image.tokens, spans,
               image.has_picture ? ", picture stored" : "");
  }
}

/// Runs of layers with one mask: `layers 0..25: causal`.
void print_masks(const std::vector<MaskRule>& masks) {
  for (std::size_t begin = 0; begin < masks.size();) {
    std::size_t end = begin + 1;
    while (end < masks.size() && masks[end] == masks[begin]) {
      ++end;
    }
    fmt::print("  mask         layers {}..{}: {}\n", begin, end - 1, name_of(masks[begin]));
    begin = end;
  }
}

void print_sequence(std::size_t index, const traces::SequenceSummary& summary) {
  const SequenceInfo& info = summary.info;
  fmt::print("\nsequence {}: {} (group {})\n", index, printable(info.name), printable(info.group));
  fmt::print("  model        {}, recorded with {}\n",
             summary.model.empty() ? "not stated" : printable(summary.model),
             summary.attention_implementation.empty() ? "no stated attention implementation"
                                                      : printable(summary.attention_implementation));
  fmt::print("  shape        {} layers, {} query heads, {} KV heads, head_dim {}\n", info.layers,
             info.query_heads, info.kv_heads, info.head_dim ? fmt::format("{}", *info.head_dim) : "unknown");
  print_images(summary);
  fmt::print("  payload      {}{}, {} bytes, scale {}\n", name_of(info.payload),
             info.has_values ? "" : " without v", summary.payload_bytes, info.scale);
  if (summary.cache_bytes) {
    fmt::print("  full cache   {} bytes\n", *summary.cache_bytes);
  }
  print_masks(info.masks);
  print_datasets(summary);
  for (const std::string& advice : summary.lint) {
    fmt::print("  lint         {}\n", advice);
  }
}

void print(const traces::TraceSummary& trace) {
  fmt::print("{}: trace format {}, {} bytes, {} sequence{}\n", trace.path, traces::kFormatVersion,
             trace.bytes, trace.sequences.size(), trace.sequences.size() == 1 ? "" : "s");
  fmt::print("recorder     {}\n", printable(trace.origin.recorder));
  fmt::print("libraries    {}\n", printable(trace.origin.libraries));
  fmt::print("command      {}\n", printable(trace.origin.command));
  for (std::size_t index = 0; index < trace.sequences.size(); ++index) {
    print_sequence(index, trace.sequences[index]);
  }
}

void run(const Options& options) {
  traces::TraceFile trace(options.trace, {.lock = !options.no_lock});
  const traces::TraceSummary summary = traces::describe(trace);
  if (options.json) {
    // Names come from the file: what is not UTF-8 is replaced, not an error.
    fmt::print("{}\n", to_json(summary).dump(2, ' ', false, ordered_json::error_handler_t::replace));
  } else {
    print(summary);
  }
}

}  // namespace

void add_info(CLI::App& app) {
  const auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("info", "Show what is in a trace: shapes, modality, bytes, storage, lint");
  command->add_option("trace", options->trace, "Trace file (.h5)")->required();
  command->add_flag("--json", options->json, "Print one JSON document");
  command->add_flag("--no-lock", options->no_lock, "Read without a file lock");
  command->footer("Example:\n  hae info trace.h5 --json");
  command->callback([options] { run(*options); });
}

}  // namespace hae::cli
