#include <fmt/format.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cctype>
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "sim/cli/command.hpp"
#include "sim/cli/manifest.hpp"
#include "sim/errors.hpp"
#include "sim/partial_file.hpp"

namespace hae::cli {
namespace {

/// One line on stderr, whatever the message holds.
int fail(ExitCode code, std::string message) {
  std::ranges::replace_if(
      message, [](char c) { return std::iscntrl(static_cast<unsigned char>(c)) != 0; }, ' ');
  while (message.ends_with(' ')) {
    message.pop_back();
  }
  fmt::print(stderr, "hae: {}\n", message);
  return code;
}

void build(CLI::App& app) {
  app.set_version_flag("--version", version_text());
  app.require_subcommand(1);
  app.footer(
      "`hae WORD` with another word runs the program hae-WORD, if there is one.\n"
      "Exit codes: 0 done, 1 the answer is no, 2 usage, 3 bad input file, 4 device, 5 a proved claim "
      "failed.");
  add_info(app);
  add_check(app);
  add_synth(app);
  add_import(app);
  add_policies(app);
  add_replay(app);
  add_compare(app);
  add_certify(app);
  add_rerun(app);
  add_stats(app);
  add_memory(app);
  add_validate(app);
  add_bench(app);
  add_completion(app);
}

/// Whether `word` is meant as a subcommand this program does not know.
bool is_foreign(const CLI::App& app, const std::string& word) {
  const auto known = app.get_subcommands([](const CLI::App*) { return true; });
  const bool names_one = std::ranges::any_of(known, [&](const CLI::App* c) { return c->get_name() == word; });
  return !word.empty() && word.front() != '-' && !names_one;
}

/// Replaces this process with hae-WORD; returns only if there is no such program.
int run_foreign(char** argv) {
  const std::string program = std::string("hae-") + argv[1];
  std::vector<char*> arguments;
  std::string name = program;
  arguments.push_back(name.data());
  for (char** argument = argv + 2; *argument != nullptr; ++argument) {
    arguments.push_back(*argument);
  }
  arguments.push_back(nullptr);
  if (program.find('/') == std::string::npos) {
    execvp(program.c_str(), arguments.data());
  }
  return fail(kUsage, fmt::format("unknown command '{}', and no program {} on the path; see hae --help",
                                  argv[1], program));
}

/// An interrupted command leaves no half-written file.
void remove_partial_files_and_die(int signal_number) {
  PartialFile::remove_all();
  std::signal(signal_number, SIG_DFL);
  std::raise(signal_number);
}

constexpr const char* kLostOutput = "the output cannot be written; check the disk or the pipe";

/// Whether everything that was printed has left the process.
bool output_arrived() {
  return std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
}

int run(int argc, char** argv) {
  for (const int signal_number : {SIGINT, SIGTERM, SIGHUP, SIGXFSZ}) {
    if (std::signal(signal_number, remove_partial_files_and_die) == SIG_IGN) {
      std::signal(signal_number, SIG_IGN);  // as nohup asked
    }
  }
  set_command(argc, argv);
  CLI::App app{
      "What happens to a model when tokens are evicted from its KV cache: replays recorded attention through "
      "eviction policies and measures what each loses.",
      "hae"};
  build(app);
  if (answer_completion(app, {argv + std::min(argc, 1), argv + argc})) {
    return output_arrived() ? kDone : fail(kUsage, kLostOutput);
  }
  if (argc > 1 && is_foreign(app, argv[1])) {
    return run_foreign(argv);
  }
  try {
    app.parse(argc, argv);
    return output_arrived() ? kDone : fail(kUsage, kLostOutput);
  } catch (const CLI::Success& success) {
    const int code = app.exit(success);
    return output_arrived() ? code : fail(kUsage, kLostOutput);
  } catch (const CLI::ParseError& error) {
    return fail(kUsage, std::string(error.what()) + "; see hae --help");
  } catch (const AnswerIsNo& answer) {
    return output_arrived() ? fail(kAnswerIsNo, answer.what()) : fail(kUsage, kLostOutput);
  } catch (const ClaimFailed& failed) {
    return fail(kClaimFailed, failed.what());
  } catch (const ConfigError& error) {
    return fail(kUsage, error.what());
  } catch (const OutputError& error) {
    return fail(kUsage, error.what());
  } catch (const TraceError& error) {
    return fail(kBadInput, error.what());
  } catch (const DeviceError& error) {
    return fail(kDevice, error.what());
  } catch (const std::bad_alloc&) {
    return fail(kBadInput, "out of memory; replay fewer sequences at a time with --sequence");
  } catch (const std::system_error& error) {
    return fail(kUsage, fmt::format("the system refuses ({}); use fewer --threads, or free some memory",
                                    error.what()));
  } catch (const std::exception& error) {
    return fail(kClaimFailed, std::string("internal error, please report it: ") + error.what());
  }
}

}  // namespace
}  // namespace hae::cli

int main(int argc, char** argv) {
  return hae::cli::run(argc, argv);
}
