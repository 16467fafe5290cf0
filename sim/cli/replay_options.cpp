#include "sim/cli/replay_options.hpp"

#include <CLI/CLI.hpp>

namespace hae::cli {

CLI::Option* add_traces(CLI::App& command, std::vector<std::string>& traces) {
  return command.add_option("traces", traces, "Trace files, or folders: the *.h5 files in them, by name")
      ->type_name("TRACE");
}

void add_machine_options(CLI::App& command, Index& threads, bool& no_lock) {
  command.add_option("--threads", threads, "Threads to use (default: one a core)")
      ->check(CLI::Range(Index{1}, Index{1024}));
  command.add_flag("--no-lock", no_lock, "Open traces without a file lock");
}

void add_replay_options(CLI::App& command, ReplayArguments& arguments) {
  command.add_option("--sequence", arguments.sequence, "Replay only the sequence of this name or index");
  command.add_option("--nan", arguments.nan, "NaN and infinite weights: an error, or count as 0")
      ->check(CLI::IsMember({"error", "lowest"}))
      ->capture_default_str();
  command.add_option("--backend", arguments.backend, "What runs the policies")
      ->check(CLI::IsMember({kReferenceBackend, kDeviceBackend, kCudaBackend}))
      ->capture_default_str();
  add_machine_options(command, arguments.threads, arguments.no_lock);
}

void apply(const ReplayArguments& arguments, ComparisonOptions& options) {
  check_backend(arguments.backend);
  options.backend = arguments.backend;
  if (!arguments.sequence.empty()) {
    options.sequence = arguments.sequence;
  }
  options.nan = arguments.nan == "lowest" ? NanRule::lowest : NanRule::error;
  options.threads = arguments.threads;
  options.lock = !arguments.no_lock;
}

}  // namespace hae::cli
