#include <string>

#include "tests/cli/cli.hpp"

namespace hae::testing {
namespace {

using ::testing::HasSubstr;

class Completion : public Cli {
 protected:
  /// What the program offers for the last of the words, without the meanings; one a line.
  std::string offered(const std::string& words, const std::string& environment = "") {
    const Outcome outcome = hae("completion candidates -- hae " + words, environment);
    EXPECT_EQ(outcome.err, "");
    std::istringstream lines(outcome.out);
    std::string texts;
    for (std::string line; std::getline(lines, line);) {
      texts += line.substr(0, line.find('\t')) + "\n";
    }
    return texts;
  }

  /// What bash's COMPREPLY holds, in a shell that has nothing but the script.
  std::string in_bash(const std::string& words, int current) {
    std::ofstream(folder_ / "try.bash") << fmt::format(
        "hae() {{ '{0}' \"$@\"; }}\nsource <('{0}' completion bash)\nCOMP_WORDS=({1})\nCOMP_CWORD={2}\n_hae\n"
        "printf '%s\\n' \"${{COMPREPLY[@]}}\"\n",
        HAE_PROGRAM, words, current);
    return shell("bash --norc try.bash");
  }

  std::string shell(const std::string& command) {
    const int status =
        std::system(fmt::format("cd '{}' && {} >out 2>err", folder_.string(), command).c_str());
    EXPECT_EQ(status, 0) << read(folder_ / "err");
    EXPECT_EQ(read(folder_ / "err"), "");
    return read(folder_ / "out");
  }

  static bool has(const std::string& program) {
    return std::system(fmt::format("command -v {} >/dev/null", program).c_str()) == 0;
  }
};

TEST_F(Completion, OffersEveryCommandThatHelpLists) {
  std::istringstream help(hae("--help").out);
  std::string expected;
  bool among_commands = false;
  for (std::string line; std::getline(help, line);) {
    among_commands = line == "Subcommands:" || (among_commands && !line.empty());
    if (among_commands && line.starts_with("  ") && line[2] != ' ') {
      expected += line.substr(2, line.find(' ', 2) - 2) + "\n";
    }
  }
  EXPECT_THAT(expected, HasSubstr("compare\n"));
  EXPECT_EQ(offered("''", "PATH=/usr/bin:/bin"), expected);
}

TEST_F(Completion, OffersProgramsOfThePathAsCommands) {
  for (const char* name : {"hae-greet", "hae-notes", "hae-compare"}) {
    std::ofstream(folder_ / name) << "#!/bin/sh\n";
  }
  fs::permissions(folder_ / "hae-greet", fs::perms::owner_all);
  fs::permissions(folder_ / "hae-compare", fs::perms::owner_all);
  const std::string path = fmt::format("PATH=/nowhere::'{}':$PATH", folder_.string());
  EXPECT_EQ(offered("gr", path), "greet\n");
  EXPECT_EQ(offered("no", path), "");  // It cannot be run.
  EXPECT_EQ(offered("compa", path), "compare\n");
}

TEST_F(Completion, OffersOptionsAndTheirChoices) {
  EXPECT_EQ(offered("compare --ma"), "--match\n");
  EXPECT_EQ(offered("compare t.h5 --match ''"), "mean\npeak\n");
  EXPECT_EQ(offered("compare --match=p"), "--match=peak\n");
  EXPECT_EQ(offered("import --from a"), "attention-saver\n");
  EXPECT_EQ(offered("memory --model llava-1.5-7"), "llava-1.5-7b\n");
  EXPECT_EQ(offered("completion ''"), "bash\nzsh\nfish\n");
  EXPECT_EQ(offered("--ver"), "--version\n");
}

TEST_F(Completion, LeavesFilesToTheShell) {
  for (const char* words : {"compare ''", "compare t.h5 ''", "compare --json ''", "replay t.h5 ''",
                            "nobody ''", "compare --threads ''", "policies hae ''"}) {
    EXPECT_EQ(offered(words), "") << words;
  }
}

TEST_F(Completion, OffersEveryPolicyAndItsOptions) {
  std::istringstream list(hae("policies").out);
  std::string names;
  for (std::string line; std::getline(list, line) && !line.empty();) {
    names += line.substr(0, line.find(' ')) + "\n";
  }
  EXPECT_THAT(names, HasSubstr("h2o/layerwise\n"));
  EXPECT_EQ(offered("policies ''"), names);
  EXPECT_EQ(offered("compare t.h5 --policy h2o/lay"), "h2o/layerwise\nh2o/layerwise:\n");
  EXPECT_EQ(offered("replay --policy fu"), "full\n");  // It has no options.
  EXPECT_EQ(offered("certify --policy hae:al"), "hae:alpha=\n");
  EXPECT_EQ(offered("compare --policy hae:r=1,al"), "hae:r=1,alpha=\n");
  EXPECT_EQ(offered("compare --policy hae:r=1,r"), "hae:r=1,recent=\n");  // r is given.
  EXPECT_EQ(offered("compare --policy=log:p"), "--policy=log:path=\n");
}

TEST_F(Completion, BashCompletesWordsThatItSplits) {
  EXPECT_EQ(in_bash("hae comp", 1), "compare\ncompletion\n");
  EXPECT_EQ(in_bash("hae compare --pol", 2), "--policy\n");
  EXPECT_EQ(in_bash("hae compare --policy h2o/lay", 3), "h2o/layerwise\nh2o/layerwise:\n");
  // As bash hands them over: colons and equal signs are words. Only what comes behind them is replaced.
  EXPECT_EQ(in_bash("hae compare --policy hae : al", 5), "alpha=\n");
  EXPECT_EQ(in_bash("hae compare --policy h2o/layerwise : bud", 5), "budget=\n");
  EXPECT_EQ(in_bash("hae compare --policy hae : r = 1,al", 7), "1,alpha=\n");
  EXPECT_EQ(in_bash("hae compare --policy hae : bin = 1 --policy gre", 9), "greedy\ngreedy:\n");
  EXPECT_EQ(in_bash("hae compare --match = p", 4), "peak\n");
}

TEST_F(Completion, ScriptsHaveTheSyntaxOfTheirShells) {
  for (const char* name : {"bash", "zsh", "fish"}) {
    const Outcome script = hae(fmt::format("completion {}", name));
    ASSERT_EQ(script.code, 0);
    EXPECT_THAT(script.out, HasSubstr("hae completion " + std::string(name)));
    std::ofstream(folder_ / "script") << script.out;
    if (has(name)) {
      shell(fmt::format("{} -n script", name));
    }
  }
  expect_one_line(hae("completion tcsh"), 2);
  expect_one_line(hae("completion"), 2);
}

TEST_F(Completion, FishCompletes) {
  if (!has("fish")) {
    GTEST_SKIP() << "no fish here";
  }
  const auto in_fish = [&](const std::string& line) {
    return shell(
        fmt::format("fish --no-config -c \"set PATH (dirname {0}) \\$PATH; hae completion fish | source; "
                    "complete -C '{1}' | cut -f1\"",
                    HAE_PROGRAM, line));
  };
  EXPECT_EQ(in_fish("hae compare --pol"), "--policy\n");
  EXPECT_EQ(in_fish("hae compare --policy h2o/lay"), "h2o/layerwise\nh2o/layerwise:\n");
  EXPECT_EQ(in_fish("hae compare --policy hae:r=1,al"), "hae:r=1,alpha=\n");
  std::ofstream(folder_ / "trace.h5");
  EXPECT_EQ(in_fish("hae info tra"), "trace.h5\n");
}

}  // namespace
}  // namespace hae::testing
