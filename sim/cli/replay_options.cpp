#include "sim/cli/replay_options.hpp"

#include <CLI/CLI.hpp>

namespace hae::cli {

void add_replay_options(CLI::App& command, ReplayArguments& arguments) {
  command.add_option("--sequence", arguments.sequence, "Replay only the sequence of this name or index");
  command.add_option("--nan", arguments.nan, "NaN and infinite weights: an error, or count as 0")
      ->check(CLI::IsMember({"error", "lowest"}))
      ->capture_default_str();
  command.add_option("--backend", arguments.backend, "What runs the policies")
      ->check(CLI::IsMember({"reference", "device", "cuda"}))
      ->capture_default_str();
  command.add_flag("--no-lock", arguments.no_lock, "Open traces without a file lock");
}

void apply(const ReplayArguments& arguments, ComparisonOptions& options) {
  if (arguments.backend != "reference") {
    throw DeviceError("--backend " + arguments.backend + ": built without " +
                      (arguments.backend == "cuda" ? "CUDA" : "a device backend") +
                      "; use --backend reference");
  }
  if (!arguments.sequence.empty()) {
    options.sequence = arguments.sequence;
  }
  options.nan = arguments.nan == "lowest" ? NanRule::lowest : NanRule::error;
  options.lock = !arguments.no_lock;
}

}  // namespace hae::cli
