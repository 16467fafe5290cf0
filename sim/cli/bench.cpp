#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "cuda/benchmark.hpp"
#include "sim/cli/command.hpp"
#include "sim/cli/device_backend.hpp"
#include "sim/cli/manifest.hpp"
#include "sim/cli/output_file.hpp"
#include "sim/cli/result_json.hpp"

namespace hae::cli {
namespace {

struct Arguments {
  bool device = false;
  std::vector<Index> sequences;
  std::vector<Index> bins;
  device::BenchmarkShape shape;
  std::string json;
};

/// What was not given: on an accelerator a layer of a model of 7 billion parameters with grouped heads and up
/// to 256 sequences; on a CPU so little that it takes seconds.
void choose_defaults(Arguments& arguments) {
  const bool is_large = device::is_accelerator();
  const auto choose = [is_large](Index& value, Index large, Index small) {
    value = value > 0 ? value : is_large ? large : small;
  };
  choose(arguments.shape.layers, 4, 1);
  choose(arguments.shape.query_heads, 32, 4);
  choose(arguments.shape.kv_heads, 8, 2);
  choose(arguments.shape.head_dim, 128, 32);
  choose(arguments.shape.tokens, 1024, 128);
  if (arguments.sequences.empty()) {
    arguments.sequences = is_large ? std::vector<Index>{1, 4, 16, 64, 256} : std::vector<Index>{1, 4};
  }
  if (arguments.bins.empty()) {
    arguments.bins =
        is_large ? std::vector<Index>{1, 2, 4, 8, 16, 32, 64, 128} : std::vector<Index>{1, 4, 16};
  }
  if (arguments.shape.query_heads % arguments.shape.kv_heads != 0) {
    throw ConfigError(fmt::format("--query-heads {} is not a multiple of --kv-heads {}",
                                  arguments.shape.query_heads, arguments.shape.kv_heads));
  }
  if (const Index bin = std::ranges::max(arguments.bins); bin >= arguments.shape.tokens) {
    throw ConfigError(fmt::format("--bins {} is not below the {} tokens that a KV head holds; raise --tokens",
                                  bin, arguments.shape.tokens));
  }
}

Json case_json(const device::BenchmarkShape& shape, const device::BenchmarkResult& result, double copy) {
  Json json{{"sequences", shape.sequences},
            {"layers", shape.layers},
            {"query_heads", shape.query_heads},
            {"kv_heads", shape.kv_heads},
            {"head_dim", shape.head_dim},
            {"tokens", shape.tokens},
            {"bytes_on_device", result.bytes_on_device},
            {"plain_attention_seconds", result.plain_attention_seconds},
            {"largest_difference", result.largest_difference}};
  json["operations"] = Json::array();
  for (const device::OperationTime& operation : result.operations) {
    const double bandwidth = operation.bytes / operation.seconds;
    json["operations"].push_back({{"name", operation.name},
                                  {"seconds", operation.seconds},
                                  {"bytes_per_second", bandwidth},
                                  {"share_of_copy_bandwidth", bandwidth / copy}});
  }
  json["steps"] = Json::array();
  for (const device::StepTime& step : result.steps) {
    json["steps"].push_back(
        {{"bin", step.bin},
         {"seconds", step.seconds},
         {"seconds_evicting", step.seconds_evicting},
         {"evicting_per_plain_attention", step.seconds_evicting / result.plain_attention_seconds}});
  }
  return json;
}

void print_case(const Json& measured) {
  const auto number = [](const Json& value) { return value.get<double>(); };
  fmt::print("\n{} sequences x {} layers, {} tokens a KV head, {:.1f} MiB\n",
             measured["sequences"].get<Index>(), measured["layers"].get<Index>(),
             measured["tokens"].get<Index>(), number(measured["bytes_on_device"]) / 1048576.0);
  fmt::print("  {:<16} {:>12.1f} us\n", "plain attention", number(measured["plain_attention_seconds"]) * 1e6);
  for (const Json& operation : measured["operations"]) {
    fmt::print("  {:<16} {:>12.1f} us  {:>8.2f} GB/s  {:>5.1f} % of a copy's\n",
               operation["name"].get<std::string>(), number(operation["seconds"]) * 1e6,
               number(operation["bytes_per_second"]) / 1e9,
               number(operation["share_of_copy_bandwidth"]) * 100.0);
  }
  for (const Json& step : measured["steps"]) {
    fmt::print("  step, D = {:<6} {:>12.1f} us, of which evicting {:.1f} us = {:.2f} plain attentions{}\n",
               step["bin"].get<Index>(), number(step["seconds"]) * 1e6,
               number(step["seconds_evicting"]) * 1e6, number(step["evicting_per_plain_attention"]),
               step["bin"] == 1 ? " (greedy)" : "");
  }
}

void run(Arguments& arguments) {
  if (!arguments.device) {
    throw ConfigError("bench measures the device backend: hae bench --device");
  }
  check_backend(kDeviceBackend);
  check_outputs({arguments.json}, {});
  choose_defaults(arguments);
  constexpr Index kCopied = Index{256} << 20;  // more than any cache
  const double copy = device::copy_bandwidth(kCopied);
  Json result{{"schema", "hae.bench/1"},         {"command", command()},          {"version", version_text()},
              {"device", device::device_name()}, {"copy_bytes_per_second", copy}, {"cases", Json::array()}};
  fmt::print("{}\n{}; a copy moves {:.1f} GB/s\n", version_text(), device::device_name(), copy / 1e9);
  for (const Index sequences : arguments.sequences) {
    device::BenchmarkShape shape = arguments.shape;
    shape.sequences = sequences;
    shape.bins = arguments.bins;
    result["cases"].push_back(case_json(shape, device::measure(shape), copy));
    print_case(result["cases"].back());
  }
  if (!arguments.json.empty()) {
    write_file(arguments.json, json_text(result));
  }
}

}  // namespace

void add_bench(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  arguments->shape = {
      .sequences = 0, .layers = 0, .query_heads = 0, .kv_heads = 0, .head_dim = 0, .tokens = 0};
  CLI::App* command = app.add_subcommand("bench", "Measure what evicting costs on the device");
  command->add_flag("--device", arguments->device, "The operations of the device backend");
  const auto count = [&](const char* name, Index& value, const char* meaning, Index least, Index most) {
    command->add_option(name, value, meaning)->check(CLI::Range(least, most));
  };
  constexpr Index kMost = Index{1} << 30;
  command->add_option("--sequences", arguments->sequences, "How many at once: a list a,b,c")
      ->delimiter(',')
      ->check(CLI::Range(Index{1}, kMost));
  command->add_option("--bins", arguments->bins, "Capacities D of the recycle bin: a list a,b,c; 1 is greedy")
      ->delimiter(',')
      ->check(CLI::Range(Index{1}, kMost));
  count("--layers", arguments->shape.layers, "Layers", 1, kMost);
  count("--query-heads", arguments->shape.query_heads, "Query heads of a layer", 1, kMost);
  count("--kv-heads", arguments->shape.kv_heads, "KV heads of a layer", 1, kMost);
  count("--head-dim", arguments->shape.head_dim, "Dimensions of a head", 1, 256);
  count("--tokens", arguments->shape.tokens, "Tokens that each KV head holds", 2, kMost);
  command->add_option("--json", arguments->json, "Write everything to this file (schema hae.bench/1)");
  command->footer("Example:\n  hae bench --device --sequences 1,16 --json bench.json");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace hae::cli
