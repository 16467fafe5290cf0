#pragma once

#include <string>
#include <vector>

#include "sim/cli/comparison.hpp"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace hae::cli {

/// Options that every replaying command has.
struct ReplayArguments {
  std::string sequence;
  std::string nan = "error";
  std::string backend = kReferenceBackend;
  Index threads = 0;
  bool no_lock = false;
};

/// TRACE...: files and folders, for trace_files.
CLI::Option* add_traces(CLI::App& command, std::vector<std::string>& traces);

/// --threads and --no-lock.
void add_machine_options(CLI::App& command, Index& threads, bool& no_lock);

void add_replay_options(CLI::App& command, ReplayArguments& arguments);

/// Carries them over. throws DeviceError for a backend that this build lacks
void apply(const ReplayArguments& arguments, ComparisonOptions& options);

}  // namespace hae::cli
