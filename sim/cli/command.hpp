#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace hae::cli {

/// Exit codes of every subcommand.
enum ExitCode : int {
  kDone = 0,
  kAnswerIsNo = 1,
  kUsage = 2,
  kBadInput = 3,
  kDevice = 4,
  kClaimFailed = 5,
};

// Type names, as --help shows them, of values that completion knows.
inline constexpr const char* kPolicySpec = "SPEC";
inline constexpr const char* kPolicyName = "POLICY";
inline constexpr const char* kModelName = "MODEL";

/// Thrown by a subcommand whose work is done and whose answer is no (exit code 1). The message goes to
/// stderr.
class AnswerIsNo : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Thrown by a subcommand on a trace that meets a proved claim's assumptions and breaks it (exit code 5).
class ClaimFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Each adds one subcommand. Its callback writes results to stdout and throws the library's errors (or
// CLI::Error); main turns an exception into one line on stderr and an exit code.
void add_info(CLI::App& app);
void add_check(CLI::App& app);
void add_synth(CLI::App& app);
void add_import(CLI::App& app);
void add_policies(CLI::App& app);
void add_replay(CLI::App& app);
void add_compare(CLI::App& app);
void add_certify(CLI::App& app);
void add_rerun(CLI::App& app);
void add_stats(CLI::App& app);
void add_memory(CLI::App& app);
void add_validate(CLI::App& app);
void add_bench(CLI::App& app);
void add_completion(CLI::App& app);

/// Answers a completion script, which asks what the last word of a command line can be: one candidate a line,
/// a tab and what it means; none where a file may stand.
///
/// arguments  of this program: `completion candidates --` and the words up to the cursor
/// returns    whether they are a script's
bool answer_completion(const CLI::App& app, const std::vector<std::string>& arguments);

}  // namespace hae::cli
