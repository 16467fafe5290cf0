#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>

#include "sim/cli/command.hpp"
#include "sim/errors.hpp"
#include "traces/check.hpp"
#include "traces/trace_file.hpp"

namespace hae::cli {
namespace {

struct Options {
  std::string trace;
  Index messages = 10;
  bool no_lock = false;
};

void run(const Options& options) {
  traces::TraceFile trace(options.trace, {.lock = !options.no_lock});
  const traces::CheckReport report = traces::check_file(trace, options.messages);
  for (const std::string& violation : report.violations) {
    fmt::print(stderr, "{}\n", violation);
  }
  if (report.total > 0) {
    throw TraceError(fmt::format("{}: {} violation{} in all; record the trace again", trace.name(),
                                 report.total, report.total == 1 ? "" : "s"));
  }
  fmt::print("{}: sound: {} sequence{}, {} attention rows read, {} of them masked\n", trace.name(),
             trace.sequences(), trace.sequences() == 1 ? "" : "s", report.rows, report.masked_rows);
}

}  // namespace

void add_check(CLI::App& app) {
  const auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("check", "Check every invariant of a trace and name the first violations");
  command->add_option("trace", options->trace, "Trace file (.h5)")->required();
  command->add_option("--messages", options->messages, "How many violations to name")
      ->check(CLI::Range(Index{0}, Index{1'000'000}))
      ->capture_default_str();
  command->add_flag("--no-lock", options->no_lock, "Read without a file lock");
  command->footer("Example:\n  hae check trace.h5\nExit code 3 when the trace is not sound.");
  command->callback([options] { run(*options); });
}

}  // namespace hae::cli
