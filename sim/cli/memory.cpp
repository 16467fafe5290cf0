#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "sim/cli/command.hpp"
#include "sim/cli/manifest.hpp"
#include "sim/cli/model_shape.hpp"
#include "sim/cli/output_file.hpp"
#include "sim/cli/replay_options.hpp"
#include "sim/cli/run_table.hpp"
#include "sim/cli/terminal.hpp"
#include "sim/cli/trace_files.hpp"

namespace hae::cli {
namespace {

constexpr const char* kSchema = "hae.memory/1";
constexpr double kKiB = 1024.0;
constexpr double kMiB = 1024.0 * 1024.0;

/// Steps at which a table shows a run: the first one that has at least this share of the decode steps behind
/// it, its own included; the first step for 0.
constexpr std::array<Index, 5> kPercents = {0, 25, 50, 75, 100};

struct Arguments {
  std::vector<std::string> traces;
  std::vector<std::string> policies;
  ReplayArguments replay;
  std::string model;
  CacheShape shape;
  Index tokens = 0;
  std::vector<Index> published;
  std::string json;
};

/// The cache that was asked about; none when only the trace's own is.
std::optional<CacheShape> asked_shape(const Arguments& arguments) {
  const CacheShape& given = arguments.shape;
  const bool some = given.layers > 0 || given.kv_heads > 0 || given.head_dim > 0;
  const bool all = given.layers > 0 && given.kv_heads > 0 && given.head_dim > 0;
  if (!arguments.model.empty()) {
    if (some) {
      throw ConfigError(
          "--model is a shape already; leave out --layers, --kv-heads and --head-dim, or --model");
    }
    CacheShape shape = model_shape(arguments.model).shape;
    shape.element_bytes = given.element_bytes;
    return shape;
  }
  if (some && !all) {
    throw ConfigError("a shape is --layers, --kv-heads and --head-dim; give all three, or --model");
  }
  return all ? std::optional(given) : std::nullopt;
}

void check(const Arguments& arguments, const std::optional<CacheShape>& shape) {
  if (arguments.traces.empty() != arguments.policies.empty()) {
    throw ConfigError(arguments.traces.empty()
                          ? "--policy needs a trace to run it on; name one"
                          : "a trace needs a policy to run on it; give --policy, e.g. full");
  }
  if (!shape && (arguments.tokens > 0 || !arguments.published.empty())) {
    throw ConfigError(
        "--tokens and --published need a shape; give --model, or --layers, --kv-heads and "
        "--head-dim");
  }
}

/// What would make a published number of bytes a token of a shape's own: the sizes of a cached number and the
/// counts of sequences held at once (a batch, or beams) that come within 5 % of it. Possibilities, not facts.
Json explanations(CacheShape shape, Index published) {
  Json found = Json::array();
  for (const Index element_bytes : {1, 2, 4, 8}) {
    shape.element_bytes = element_bytes;
    for (Index sequences = 1; sequences <= 16; ++sequences) {
      const Index bytes = shape.token_bytes() * sequences;
      if (std::abs(bytes - published) * 20 <= published) {
        found.push_back({{"element_bytes", element_bytes}, {"sequences", sequences}, {"token_bytes", bytes}});
      }
    }
  }
  return found;
}

Json shape_json(const Arguments& arguments, const CacheShape& shape) {
  Json json;
  json["model"] = arguments.model.empty() ? Json(nullptr) : Json(arguments.model);
  json["source"] = arguments.model.empty() ? Json(nullptr) : Json(model_shape(arguments.model).source);
  json["layers"] = shape.layers;
  json["kv_heads"] = shape.kv_heads;
  json["head_dim"] = shape.head_dim;
  json["element_bytes"] = shape.element_bytes;
  json["token_bytes"] = shape.token_bytes();
  json["tokens"] = arguments.tokens > 0 ? Json(arguments.tokens) : Json(nullptr);
  json["bytes"] = arguments.tokens > 0 ? Json(arguments.tokens * shape.token_bytes()) : Json(nullptr);
  json["published"] = Json::array();
  for (const Index published : arguments.published) {
    json["published"].push_back(
        {{"token_bytes", published},
         {"ratio", static_cast<double>(published) / static_cast<double>(shape.token_bytes())},
         {"would_be", explanations(shape, published)}});
  }
  return json;
}

/// Bytes of the trace's own cache; null when the trace does not say.
Json own_bytes(const SequenceInfo& info, const RunResult& run) {
  const std::optional<Bytes> bytes = count_bytes(info, run);
  if (!bytes) {
    return nullptr;
  }
  Json by_step = Json::array();
  for (const Index tokens : attention_tokens_by_step(info, run)) {
    by_step.push_back(tokens * *lane_token_bytes(info, run));
  }
  return {{"prefill", bytes->prefill},
          {"mean", json_or_null(bytes->mean)},
          {"peak", json_or_null(bytes->peak)},
          {"final", bytes->final},
          {"by_step", std::move(by_step)}};
}

/// Bytes of another model's cache that holds as many tokens as the run's lanes do on average:
/// tokens * token_bytes / lanes, the product exact.
Json model_bytes(const SequenceInfo& info, const RunResult& run, Index token_bytes) {
  const Index lanes = info.layers * lane_count(info, run.lanes);
  const auto scaled = [&](Index tokens, Index times = 1) {
    return static_cast<double>(WideIndex{tokens} * token_bytes) / static_cast<double>(lanes * times);
  };
  Json by_step = Json::array();
  Index peak = 0;
  for (const Index tokens : attention_tokens_by_step(info, run)) {
    by_step.push_back(scaled(tokens));
    peak = std::max(peak, tokens);
  }
  Index final_tokens = 0;
  for (const Index tokens : run.final_tokens) {
    final_tokens += tokens;
  }
  const bool has_steps = info.steps() > 0;
  const Index total = total_attention_tokens(run);
  return {{"prefill", scaled(run.prefill_tokens)},
          {"mean", has_steps ? Json(scaled(total, info.steps())) : Json(nullptr)},
          {"peak", has_steps ? Json(scaled(peak)) : Json(nullptr)},
          {"final", scaled(final_tokens)},
          {"by_step", std::move(by_step)}};
}

Json memory_json(const RunRecord& record, const std::optional<CacheShape>& shape) {
  Json json;
  json["sequence"] = {{"index", record.sequence_index}, {"name", record.info.name}};
  json["group"] = record.info.group;
  json["policy"] = record.spec;
  json["lanes"] = record.info.layers * lane_count(record.info, record.result.lanes);
  json["tokens_by_step"] = attention_tokens_by_step(record.info, record.result);
  json["bytes"] = own_bytes(record.info, record.result);
  json["model_bytes"] = shape ? model_bytes(record.info, record.result, shape->token_bytes()) : Json(nullptr);
  return json;
}

/// Replaces the series by what it is at kPercents of its steps.
Json brief(Json bytes) {
  if (bytes.is_null()) {
    return bytes;
  }
  const Json by_step = bytes["by_step"];
  bytes.erase("by_step");
  bytes["at_percent"] = Json::array();
  for (const Index percent : kPercents) {
    const auto steps = static_cast<Index>(by_step.size());
    const Index step = std::max<Index>(1, (steps * percent + 99) / 100);
    bytes["at_percent"].push_back(steps == 0 ? Json(nullptr) : by_step[at(step - 1)]);
  }
  return bytes;
}

/// One element a policy: means over groups.
Json memory_summary(const Json& runs, const std::vector<PolicySource>& policies) {
  Json summary = Json::array();
  for (const PolicySource& policy : policies) {
    std::vector<std::pair<std::string, Json>> of_policy;
    for (const Json& run : runs) {
      if (run["policy"] == policy.spec()) {
        of_policy.emplace_back(
            run["group"].get<std::string>(),
            Json{{"bytes", brief(run["bytes"])}, {"model_bytes", brief(run["model_bytes"])}});
      }
    }
    Json line{{"policy", policy.spec()}, {"sequences", of_policy.size()}};
    line.update(group_intervals(of_policy));
    summary.push_back(std::move(line));
  }
  return summary;
}

void print_shape(const Json& shape) {
  print_prose("{}{} layers x {} KV heads x {} x 2 (K and V) x {} bytes = {} bytes a token, {:.4g} MiB",
              shape["model"].is_null() ? "" : shape["model"].get<std::string>() + ": ",
              shape["layers"].get<Index>(), shape["kv_heads"].get<Index>(), shape["head_dim"].get<Index>(),
              shape["element_bytes"].get<Index>(), shape["token_bytes"].get<Index>(),
              shape["token_bytes"].get<double>() / kMiB);
  if (!shape["source"].is_null()) {
    print_prose("source: {}", shape["source"].get<std::string>());
  }
  if (!shape["tokens"].is_null()) {
    fmt::print("{} tokens: {} bytes, {:.1f} MiB\n", shape["tokens"].get<Index>(), shape["bytes"].get<Index>(),
               shape["bytes"].get<double>() / kMiB);
  }
  for (const Json& published : shape["published"]) {
    print_prose(
        "\n{} bytes a token would be {:.4g} times that. Within 5 % of it, and no more than "
        "possibilities:",
        published["token_bytes"].get<Index>(), published["ratio"].get<double>());
    Rows rows{{"bytes a number", "sequences at once", "bytes a token", "off"}};
    for (const Json& way : published["would_be"]) {
      const double off = way["token_bytes"].get<double>() / published["token_bytes"].get<double>() - 1.0;
      rows.push_back({way["element_bytes"].dump(), way["sequences"].dump(), way["token_bytes"].dump(),
                      fmt::format("{:+.1f} %", 100.0 * off)});
    }
    std::fputs(rows.size() > 1 ? format_table(rows).c_str() : "none\n", stdout);
  }
}

/// key  `bytes` or `model_bytes`
void print_bytes(const Json& summary, const char* key, const char* title, double unit) {
  fmt::print("\n{}\n", title);
  Rows rows{{"policy", "prefill"}};
  for (const Index percent : kPercents) {
    rows.front().push_back(percent == 0 ? "step 1" : fmt::format("{} %", percent));
  }
  for (const char* heading : {"mean", "peak", "final"}) {
    rows.front().emplace_back(heading);
  }
  const auto text = [&](const Json& figure) {
    return figure.is_null() ? "-" : fmt::format("{:.1f}", figure["mean"].get<double>() / unit);
  };
  for (const Json& policy : summary) {
    const Json& bytes = policy[key];
    std::vector<std::string>& row = rows.emplace_back(std::vector{policy["policy"].get<std::string>()});
    if (bytes.is_null()) {
      continue;
    }
    row.push_back(text(bytes["prefill"]));
    for (const Json& at_percent : bytes["at_percent"]) {
      row.push_back(text(at_percent));
    }
    for (const char* figure : {"mean", "peak", "final"}) {
      row.push_back(text(bytes[figure]));
    }
  }
  std::fputs(format_table(rows).c_str(), stdout);
}

void print_runs(const Json& result) {
  const Json& summary = result["summary"];
  const std::size_t sequences = result["runs"].size() / summary.size();
  print_prose(
      "{} sequence{}; bytes of the KV cache while attention is computed, means over groups; `50 %`: at "
      "half of the decode steps",
      sequences, sequences == 1 ? "" : "s");
  print_bytes(summary, "bytes", "the trace's own shape, KiB", kKiB);
  if (!result["shape"].is_null()) {
    print_bytes(summary, "model_bytes", "as many tokens at the shape above, MiB", kMiB);
  }
}

void print_models() {
  Rows rows{{"model", "layers", "KV heads", "head_dim", "bytes a token", "source"}};
  for (const ModelShape& model : model_shapes()) {
    const CacheShape& shape = model.shape;
    rows.push_back({model.name, fmt::format("{}", shape.layers), fmt::format("{}", shape.kv_heads),
                    fmt::format("{}", shape.head_dim), fmt::format("{}", shape.token_bytes()), model.source});
  }
  std::fputs(format_table(rows).c_str(), stdout);
  print_prose("\n2 bytes a number. `hae memory --model NAME` shows one; see hae memory --help.");
}

void run(const Arguments& arguments) {
  const std::optional<CacheShape> shape = asked_shape(arguments);
  check(arguments, shape);
  ComparisonOptions options;
  options.traces = trace_files(arguments.traces);
  options.policies = arguments.policies;
  options.optimal = false;
  apply(arguments.replay, options);
  const std::vector<PolicySource> policies = policy_sources(options.policies, options.lock);
  check_outputs({arguments.json}, input_files(options, policies));
  Json result{{"schema", kSchema}};
  result["manifest"] = arguments.json.empty() ? Json(nullptr) : Json(manifest(options, policies));
  result["shape"] = shape ? shape_json(arguments, *shape) : Json(nullptr);
  result["runs"] = Json::array();
  if (!arguments.traces.empty()) {
    compare(options, policies, [&](const std::vector<RunRecord>& records) {
      for (const RunRecord& record : records) {
        result["runs"].push_back(memory_json(record, shape));
      }
    });
  }
  result["summary"] = memory_summary(result["runs"], policies);
  if (!arguments.json.empty()) {
    write_file(arguments.json, json_text(result));
  }
  if (!shape && arguments.traces.empty()) {
    print_models();
  }
  if (shape) {
    print_shape(result["shape"]);
  }
  if (!arguments.traces.empty()) {
    fmt::print("{}", shape ? "\n" : "");
    print_runs(result);
  }
}

}  // namespace

void add_memory(CLI::App& app) {
  constexpr Index kMost = 1024;  // products of these with --tokens stay within 64 bits
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand(
      "memory", "Bytes of a KV cache: of a model's shape, and over time while policies evict");
  add_traces(*command, arguments->traces);
  command->add_option("--policy", arguments->policies, "name or name:key=value,key=value")
      ->type_name(kPolicySpec)
      ->allow_extra_args(false);
  command->add_option("--model", arguments->model, "A shape by name; `hae memory` lists them")
      ->type_name(kModelName);
  command->add_option("--layers", arguments->shape.layers)->check(CLI::Range(Index{1}, kMost));
  command->add_option("--kv-heads", arguments->shape.kv_heads)->check(CLI::Range(Index{1}, kMost));
  command->add_option("--head-dim", arguments->shape.head_dim)->check(CLI::Range(Index{1}, kMost));
  command
      ->add_option("--element-bytes", arguments->shape.element_bytes,
                   "Bytes of one cached number of the shape")
      ->check(CLI::IsMember({1, 2, 4, 8}))
      ->capture_default_str();
  command->add_option("--tokens", arguments->tokens, "Also the bytes of a cache of this many tokens")
      ->check(CLI::Range(Index{1}, Index{1} << 26));
  command
      ->add_option("--published", arguments->published,
                   "Bytes a token that somebody printed: what would explain the difference")
      ->check(CLI::Range(Index{1}, Index{1} << 50))
      ->allow_extra_args(false);
  command->add_option("--json", arguments->json, "Write everything to this file (schema hae.memory/1)");
  add_replay_options(*command, arguments->replay);
  command->footer(
      "Examples:\n  hae memory --model llava-1.5-7b --tokens 2048\n  hae memory traces/data/boards-test.h5 "
      "--policy hae:r=0.007,alpha=0.008 --policy full --model llava-1.5-7b");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace hae::cli
