#include "validate/validate.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

#include "sim/cli/checks.hpp"
#include "sim/cli/command.hpp"
#include "sim/cli/output_file.hpp"
#include "sim/cli/problem_words.hpp"
#include "sim/cli/progress.hpp"
#include "sim/errors.hpp"
#include "traces/problem_file.hpp"

namespace hae::cli {
namespace {

namespace fs = std::filesystem;

struct Arguments {
  std::string kernels;
  std::vector<std::string> operations;
  std::string one_case;
  std::string repro;
  std::string save;
  std::string junit;
  std::uint64_t seed = 0;
  bool list = false;
};

/// Tells which case a library's code was in when it ended the program: by a crash, which may have used up the
/// stack, or by exit().
class Watch {
 public:
  explicit Watch(const std::string& name) {
    static std::array<char, 1 << 16> stack;
    stack_t elsewhere{};
    elsewhere.ss_sp = stack.data();
    elsewhere.ss_size = stack.size();
    sigaltstack(&elsewhere, nullptr);
    static const int registered = std::atexit(tell_exit);
    static_cast<void>(registered);
    at(name);
  }
  ~Watch() { running_[0] = '\0'; }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void at(const std::string& name) {
    running_[name.copy(running_.data(), running_.size() - 1)] = '\0';
    struct sigaction action {};
    action.sa_handler = tell_crash;
    action.sa_flags = SA_ONSTACK;
    for (const int signal_number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) {
      sigaction(signal_number, &action, nullptr);
    }
  }

 private:
  static void say(const char* text) { static_cast<void>(!write(STDERR_FILENO, text, std::strlen(text))); }

  static void tell_crash(int /*signal_number*/) {
    say("hae: the library crashed in case ");
    say(running_.data());
    say("; run it alone with --case, under a debugger\n");
    _exit(kAnswerIsNo);
  }

  static void tell_exit() {
    if (running_[0] != '\0') {
      say("hae: the library called exit() in case ");
      say(running_.data());
      say("; return a status instead\n");
      _exit(kAnswerIsNo);
    }
  }

  static inline std::array<char, 512> running_{};
};

/// A library of kernels, open until the process ends: what it started may still run.
const hae_kernels& open_kernels(const std::string& path) {
  // A name without a slash would be looked for in the system's folders.
  const Watch watch("hae_kernels_table()");
  void* library = dlopen(fs::absolute(path).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw TraceError(fmt::format("{}: not a library that can be loaded: {}", path, dlerror()));
  }
  void* symbol = dlsym(library, "hae_kernels_table");
  if (symbol == nullptr) {
    throw TraceError(fmt::format(
        "{}: no function hae_kernels_table; include hae/kernels.h and export it with C linkage", path));
  }
  const hae_kernels* table = nullptr;
  try {
    table = reinterpret_cast<const hae_kernels* (*)()>(symbol)();
  } catch (const std::exception& error) {
    throw TraceError(fmt::format("{}: hae_kernels_table() threw: {}; return the table", path, error.what()));
  }
  if (table == nullptr) {
    throw TraceError(fmt::format("{}: hae_kernels_table() returned null; return the table", path));
  }
  validate::check(*table);
  return *table;
}

void print_counterexample(const validate::Outcome& outcome) {
  fmt::print("  smallest: {}\n", validate::describe(outcome.problem));
  for (const std::string& line : validate::written_out(outcome.problem)) {
    fmt::print("    {}\n", line);
  }
  for (const validate::Finding& finding : outcome.findings) {
    fmt::print("    {}: {}\n", validate::name_of(finding.kind), finding.text);
  }
}

void print_report(const validate::OperationReport& report) {
  if (!report.offered) {
    fmt::print("{}: not offered\n", report.operation);
    return;
  }
  const auto counted = [](Index cases, const char* what) {
    return cases > 0 ? fmt::format(", {} {}", cases, what) : "";
  };
  fmt::print("{}: {} of {} cases passed{}{}{}\n", report.operation, report.passed, report.outcomes.size(),
             counted(report.failed, "failed"), counted(report.unsupported, "not supported"),
             counted(report.left_out, "left out: no memory for arrays beyond 2^31 elements"));
  if (report.smallest) {
    fmt::print("  fault: {}\n  found in case {}\n", report.fault, report.smallest->name);
    print_counterexample(*report.smallest);
  }
}

std::vector<Check> checks_of(const std::vector<validate::OperationReport>& reports) {
  std::vector<Check> checks;
  for (const validate::OperationReport& report : reports) {
    for (const validate::Outcome& outcome : report.outcomes) {
      Check check{report.operation, outcome.name, outcome.status != validate::Outcome::Status::failed, ""};
      if (outcome.status == validate::Outcome::Status::unsupported) {
        check.message = "not supported by the library";
      } else if (outcome.status == validate::Outcome::Status::left_out) {
        check.message = "left out: no memory for arrays beyond 2^31 elements";
      } else if (!check.passed) {
        check.message = outcome.findings.front().text;
      }
      checks.push_back(std::move(check));
    }
  }
  return checks;
}

/// One file an operation that failed. Returns what to say about it.
std::string save_counterexamples(const fs::path& folder,
                                 const std::vector<validate::OperationReport>& reports) {
  std::string said;
  for (const validate::OperationReport& report : reports) {
    if (report.smallest) {
      const fs::path file = folder / (report.operation + ".h5");
      traces::write_problem(file, stored(*report.smallest));
      said += fmt::format("  saved: {}; hae validate --kernels LIB --repro {} runs it again\n", file.string(),
                          file.string());
    }
  }
  return said;
}

void print_list(const std::vector<std::string>& operations) {
  for (const std::string& name : operations) {
    static_cast<void>(validate::operation_of(name));
  }
  for (const validate::Operation* operation : validate::operations()) {
    if (operations.empty() || std::ranges::count(operations, operation->name) > 0) {
      for (const std::string& name : validate::case_names(*operation)) {
        fmt::print("{}\n", name);
      }
    }
  }
}

void run_again(const hae_kernels& kernels, const Arguments& arguments) {
  const traces::StoredProblem words = traces::read_problem(arguments.repro);
  validate::Problem problem;
  try {
    problem = problem_of(words);
  } catch (const ConfigError& error) {
    throw TraceError(arguments.repro + ": " + error.what());
  }
  if (!validate::operation_of(words.operation).offered(kernels)) {
    throw AnswerIsNo(fmt::format("{}: the library does not offer {}", arguments.repro, words.operation));
  }
  const Watch watch(words.case_name);
  const validate::Outcome outcome = validate::run(kernels, problem);
  fmt::print("{}, from case {}: {}\n", words.operation, words.case_name, validate::describe(problem));
  if (outcome.status == validate::Outcome::Status::unsupported) {
    throw AnswerIsNo(arguments.repro + ": the library does not support it");
  }
  if (outcome.status == validate::Outcome::Status::left_out) {
    throw DeviceError(arguments.repro +
                      ": no memory for arrays beyond 2^31 elements; run it where there is more");
  }
  for (const validate::Finding& finding : outcome.findings) {
    fmt::print("  {}: {}\n", validate::name_of(finding.kind), finding.text);
  }
  if (outcome.status == validate::Outcome::Status::failed) {
    throw AnswerIsNo(arguments.repro + ": fails");
  }
  fmt::print("passes\n");
}

void run_cases(const hae_kernels& kernels, const Arguments& arguments) {
  if (!arguments.junit.empty()) {
    check_outputs({arguments.junit}, {arguments.kernels});
  }
  Progress bar("validating", double(validate::operations().size()));
  validate::Options options{
      .seed = arguments.seed, .operations = arguments.operations, .one_case = arguments.one_case};
  Index started = -1;
  std::string operation;
  Watch watch("the first");
  options.progress = [&](const std::string& name, double done) {
    const std::string now = name.substr(0, name.find('/'));
    started += std::exchange(operation, now) != now;
    bar.show(double(started) + done);
    watch.at(name);
  };
  const std::vector<validate::OperationReport> reports = validate::validate(kernels, options);
  bar.wipe();
  std::ranges::for_each(reports, print_report);
  if (!arguments.save.empty()) {
    const OutputFolder folder{arguments.save};
    fmt::print("{}", save_counterexamples(folder.path(), reports));
  }
  if (!arguments.junit.empty()) {
    write_file(arguments.junit, junit_text("hae validate", checks_of(reports)));
  }
  const auto wrong = std::ranges::count_if(reports, [](const auto& report) { return !report.right(); });
  const auto offered = std::ranges::count_if(reports, [](const auto& report) { return report.offered; });
  if (wrong > 0 || offered == 0) {
    throw AnswerIsNo(offered == 0 ? arguments.kernels + ": offers none of the operations that were asked for"
                                  : fmt::format("{}: {} of {} operations are wrong, or served no case",
                                                arguments.kernels, wrong, offered));
  }
}

void run(const Arguments& arguments) {
  if (arguments.list) {
    print_list(arguments.operations);
    return;
  }
  if (arguments.kernels.empty()) {
    throw ConfigError(
        "--kernels is missing; name a library that exports hae_kernels_table (hae/kernels.h), or --list");
  }
  const hae_kernels& kernels = open_kernels(arguments.kernels);
  if (!arguments.repro.empty()) {
    run_again(kernels, arguments);
  } else {
    run_cases(kernels, arguments);
  }
}

}  // namespace

void add_validate(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand(
      "validate",
      "Hold somebody's kernels to the definitions of hae/kernels.h, and show the smallest input that fails");
  command->add_option("--kernels", arguments->kernels, "A shared library that exports hae_kernels_table()");
  command->add_option("--operation", arguments->operations, "Only this operation; may be repeated")
      ->allow_extra_args(false);
  command->add_option("--case", arguments->one_case, "Only this case");
  command->add_option("--seed", arguments->seed, "Other numbers in the same cases")->capture_default_str();
  command->add_flag("--list", arguments->list, "Print the names of all cases");
  command->add_option("--repro", arguments->repro, "Run a saved counterexample again");
  command->add_option("--save", arguments->save, "Save the smallest counterexamples in this folder");
  command->add_option("--junit", arguments->junit, "Write JUnit XML, one test a case");
  command->footer(
      "Example:\n  hae validate --kernels ./libmine.so --save failures --junit hae.xml\n"
      "Exit code 1 when an operation that the library offers is wrong.");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace hae::cli
