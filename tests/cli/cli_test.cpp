#include <sys/stat.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/cli/cli.hpp"

namespace hae::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST_F(Cli, SaysItsVersionAndBackends) {
  const Outcome outcome = hae("--version");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.out, HasSubstr("backends: reference"));
}

TEST_F(Cli, UsageErrorsExitWithTwoAndOneLine) {
  make_trace("t.h5");
  for (const char* arguments :
       {"", "compare", "compare t.h5", "replay t.h5 --policy nobody", "replay t.h5 --policy hae:colour=red",
        "replay t.h5 --policy hae:bin=0", "replay t.h5 --policy random",
        "replay t.h5 --policy greedy --sequence 9", "replay t.h5 --policy hae:sinks=90",
        "compare t.h5 --policy full --policy full", "policies nobody",
        "compare t.h5 --policy full --match sideways", "synth --kind marble --out x.h5", "frobnicate"}) {
    SCOPED_TRACE(arguments);
    expect_one_line(hae(arguments), 2);
  }
}

TEST_F(Cli, BadInputFilesExitWithThreeAndOneLine) {
  std::ofstream(folder_ / "text.h5") << "not a trace";
  std::ofstream(folder_ / "empty.h5");
  for (const char* arguments :
       {"info missing.h5", "info text.h5", "info empty.h5", "info .", "check text.h5",
        "replay text.h5 --policy full", "compare missing.h5 --policy full",
        "import text.h5 --from npz --out x.h5",
        "import text.h5 --from attention-saver --prompt 1 --text-only --out x.h5",
        "import text.h5 --from kvp --prompt 1 --text-only --out x.h5",
        "import . --from kvp --prompt 1 --text-only --out ../x.h5", "replay . --policy full"}) {
    SCOPED_TRACE(arguments);
    expect_one_line(hae(arguments), 3);
  }
  EXPECT_FALSE(fs::exists(folder_ / "x.h5"));
}

TEST_F(Cli, ABackendThatIsNotBuiltInExitsWithFour) {
  make_trace("t.h5");
  const Outcome outcome = hae("replay t.h5 --policy full --backend cuda");
  expect_one_line(outcome, 4);
  EXPECT_THAT(outcome.err, HasSubstr("built without CUDA"));
}

TEST_F(Cli, ADeviceRefusesAPolicyThatDoesNotRunOnIt) {
  if (hae("--version").out.find("device (Thrust") == std::string::npos) {
    GTEST_SKIP() << "built without a device backend";
  }
  make_trace("t.h5");
  const Outcome outcome = hae("compare t.h5 --policy adakv:budget=20 --backend device");
  expect_one_line(outcome, 2);
  EXPECT_THAT(outcome.err, HasSubstr("'adakv:budget=20' does not run on a device; those that do are hae,"));
  expect_one_line(hae("bench --device --tokens 8 --bins 9"), 2);
  expect_one_line(hae("bench"), 2);
}

TEST_F(Cli, AnUnknownWordRunsTheProgramOfThatName) {
  std::ofstream(folder_ / "hae-greet") << "#!/bin/sh\necho \"$0 says $1\"\nexit 7\n";
  fs::permissions(folder_ / "hae-greet", fs::perms::owner_all);
  const Outcome outcome = hae("greet hello", fmt::format("PATH='{}':$PATH", folder_.string()));
  EXPECT_EQ(outcome.code, 7);
  EXPECT_THAT(outcome.out, HasSubstr("says hello"));
}

TEST_F(Cli, EventsAreJsonLinesAndTheSummaryNamesTheirHash) {
  make_trace("t.h5");
  const Outcome events = hae("replay t.h5 --policy hae:dap=none,budget=20,bin=4 --events");
  ASSERT_EQ(events.code, 0) << events.err;
  std::istringstream lines(events.out);
  std::size_t count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    const auto event = nlohmann::json::parse(line);
    EXPECT_EQ(event.size(), 8u);
    EXPECT_EQ(event["lane"], -1);
  }
  EXPECT_GT(count, 0u);
  ASSERT_EQ(hae("compare t.h5 --policy hae:dap=none,budget=20,bin=4 --json r.json").code, 0);
  const auto result = nlohmann::json::parse(read(folder_ / "r.json"));
  EXPECT_EQ(result["runs"][0]["evictions"], count);
  std::ofstream(folder_ / "events") << events.out;
  ASSERT_EQ(std::system(fmt::format("cd '{}' && sha256sum events > sum", folder_.string()).c_str()), 0);
  EXPECT_THAT(read(folder_ / "sum"), StartsWith(result["runs"][0]["log_sha256"].get<std::string>()));
}

TEST_F(Cli, SeveralSequencesNumberTheirEventsAndCanBePicked) {
  make_trace("t.h5", "--sequences 2");
  const Outcome all = hae("replay t.h5 --policy greedy:budget=20 --events");
  EXPECT_THAT(all.out, StartsWith("{\"sequence\":0,"));
  EXPECT_THAT(all.out, HasSubstr("{\"sequence\":1,"));
  const Outcome one = hae("replay t.h5 --policy greedy:budget=20 --events --sequence 1");
  EXPECT_THAT(one.out, StartsWith("{\"step\":0,"));
}

TEST_F(Cli, CompareWritesTheStatedSchema) {
  make_trace("t.h5", "--sequences 2");
  const Outcome outcome =
      hae("compare t.h5 --policy hae:r=0.02,alpha=0.9 --policy greedy --policy h2o/layerwise --policy window "
          "--policy "
          "random:seed=1 --policy full --match mean --json r.json --csv r.csv");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto result = nlohmann::json::parse(read(folder_ / "r.json"));
  EXPECT_EQ(result["schema"], "hae.compare/1");
  for (const char* key : {"command", "version", "machine", "traces", "seed", "backend"}) {
    EXPECT_TRUE(result["manifest"].contains(key)) << key;
  }
  ASSERT_EQ(result["runs"].size(), 12u);
  ASSERT_EQ(result["summary"].size(), 6u);
  for (const auto& run : result["runs"]) {
    for (const char* key :
         {"sequence",   "policy",           "options",     "resolved",          "backend",   "tokens",
          "bytes",      "decode",           "prefill",     "missed_mass_total", "optimal",   "regret",
          "top_now",    "removed_all_rows", "masked_rows", "per_layer",         "evictions", "events",
          "moved",      "pending_final",    "log_sha256",  "unequal",           "warnings",  "evicted_kinds",
          "kept_kinds", "overlap"}) {
      EXPECT_TRUE(run.contains(key)) << key;
    }
    EXPECT_FALSE(run["unequal"].get<bool>());
  }
  EXPECT_EQ(std::ranges::count(read(folder_ / "r.csv"), '\n'), 13);
  EXPECT_TRUE(result["runs"][0]["prefill"].is_object());
  EXPECT_TRUE(result["runs"][5]["prefill"].is_null());
}

TEST_F(Cli, AFolderStandsForTheTracesInIt) {
  fs::create_directories(folder_ / "many/deeper.h5");
  // Neither sorted nor alone: a text, a hidden file, a folder with a name like a trace's and a trace in it.
  make_trace("many/b.h5", "--seed 2");
  make_trace("many/a.h5", "--seed 1");
  make_trace("many/deeper.h5/c.h5", "--seed 3");
  make_trace("single.h5", "--seed 4");
  std::ofstream(folder_ / "many/notes.txt") << "not a trace";
  std::ofstream(folder_ / "many/.hidden.h5") << "not a trace";
  const std::map<std::string, const char*> commands = {
      {"compare", " --policy greedy:budget=20"}, {"memory", " --policy greedy:budget=20"}, {"stats", ""}};
  for (const auto& [command, more] : commands) {
    SCOPED_TRACE(command);
    const Outcome by_folder = hae(command + " single.h5 many/" + more + " --json folder.json");
    ASSERT_EQ(by_folder.code, 0) << by_folder.err;
    EXPECT_EQ(by_folder.out, hae(command + " single.h5 many/a.h5 many/b.h5" + more + " --json f.json").out);
    auto result = nlohmann::json::parse(read(folder_ / "folder.json"));
    auto expected = nlohmann::json::parse(read(folder_ / "f.json"));
    ASSERT_EQ(expected["manifest"]["traces"].size(), 3u);
    EXPECT_EQ(result["manifest"]["traces"], expected["manifest"]["traces"]);
    result.erase("manifest");
    expected.erase("manifest");
    EXPECT_EQ(result, expected);
  }
}

TEST_F(Cli, AFolderWithoutTracesIsBadInput) {
  fs::create_directories(folder_ / "none/deeper");
  make_trace("none/deeper/t.h5");
  for (const char* command : {"compare none --policy full", "memory none --policy full", "stats none"}) {
    SCOPED_TRACE(command);
    const Outcome outcome = hae(command);
    expect_one_line(outcome, 3);
    EXPECT_THAT(outcome.err, HasSubstr("none: holds no *.h5 file; name a folder that does, or trace files"));
  }
  make_trace("none/t.h5");
  // What a folder stands for is not overwritten either.
  expect_one_line(hae("compare none --policy full --json none/t.h5"), 2);
}

TEST_F(Cli, AFileOfAFolderThatCannotBeReadIsNamed) {
  make_trace("many.h5");
  fs::create_directories(folder_ / "many");
  fs::create_symlink("nowhere", folder_ / "many/lost.h5");
  const Outcome outcome = hae("compare many --policy full");
  expect_one_line(outcome, 3);
  EXPECT_THAT(outcome.err, HasSubstr("many/lost.h5"));
}

TEST_F(Cli, UnequalMemoryIsMarkedAndExitsWithOneUnlessAllowed) {
  make_trace("t.h5");
  const std::string command =
      "compare t.h5 --policy greedy:budget=20 --policy greedy:budget=30 --policy full --json r.json";
  const Outcome outcome = hae(command);
  expect_one_line(outcome, 1);
  EXPECT_THAT(outcome.out, HasSubstr("unequal"));
  const auto result = nlohmann::json::parse(read(folder_ / "r.json"));  // written also when the answer is no
  EXPECT_FALSE(result["runs"][0]["unequal"].get<bool>());
  EXPECT_TRUE(result["runs"][1]["unequal"].get<bool>());
  EXPECT_FALSE(result["runs"][2]["unequal"].get<bool>());  // full is exempt
  EXPECT_EQ(hae(command + " --allow-unequal").code, 0);
}

TEST_F(Cli, TheSameCommandGivesTheSameFile) {
  make_trace("t.h5");
  const std::string command =
      "compare t.h5 --policy hae:dap=none,budget=20 --policy random:budget=20 --allow-unequal --json ";
  ASSERT_EQ(hae(command + "r.json").code, 0);
  const std::string first = read(folder_ / "r.json");
  ASSERT_EQ(hae(command + "r.json").code, 0);
  EXPECT_EQ(first, read(folder_ / "r.json"));
}

TEST_F(Cli, AnUnwritableResultIsAnErrorAndLeavesNothing) {
  make_trace("t.h5");
  expect_one_line(hae("compare t.h5 --policy full --json nowhere/r.json"), 2);
  expect_one_line(hae("replay t.h5 --policy full --out nowhere/r.h5"), 2);
  for (const auto& entry : fs::directory_iterator(folder_)) {
    EXPECT_THAT(entry.path().string(), Not(HasSubstr("partial")));
  }
}

TEST_F(Cli, OutputThatIsLostIsAnError) {
  make_trace("t.h5", "--sequences 40");  // more text than a buffer of stdio holds
  const std::string command =
      fmt::format("cd '{}' && '{}' replay t.h5 --policy greedy:budget=4 --events >/dev/full 2>err",
                  folder_.string(), HAE_PROGRAM);
  const int status = std::system(command.c_str());
  EXPECT_EQ(WEXITSTATUS(status), 2);
  EXPECT_THAT(read(folder_ / "err"), HasSubstr("the output cannot be written"));
}

TEST_F(Cli, ALinkOrADeviceIsWrittenToAndNotReplaced) {
  make_trace("t.h5");
  fs::create_symlink(folder_ / "target.json", folder_ / "link.json");
  ASSERT_EQ(hae("compare t.h5 --policy full --json link.json").code, 0);
  EXPECT_TRUE(fs::is_symlink(folder_ / "link.json"));
  EXPECT_THAT(read(folder_ / "target.json"), StartsWith("{"));
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  const std::string command =
      fmt::format("cd '{}' && (cat pipe >piped &) && '{}' compare t.h5 --policy full --csv pipe >out",
                  folder_.string(), HAE_PROGRAM);
  ASSERT_EQ(std::system(command.c_str()), 0);
  EXPECT_TRUE(fs::is_fifo(folder_ / "pipe"));
  expect_one_line(hae("replay t.h5 --policy full --out pipe"), 2);  // HDF5 cannot be written into a pipe
  EXPECT_TRUE(fs::is_fifo(folder_ / "pipe"));
}

TEST_F(Cli, AnOutputIsNeverAnInputOrAnotherOutput) {
  make_trace("t.h5");
  const std::string before = read(folder_ / "t.h5");
  fs::create_symlink("t.h5", folder_ / "link.h5");
  for (const char* arguments :
       {"replay t.h5 --policy full --out t.h5", "compare t.h5 --policy full --json ./t.h5",
        "compare t.h5 --policy full --csv link.h5", "import t.h5 --from npz --out t.h5",
        "compare t.h5 --policy full --json r --csv r"}) {
    SCOPED_TRACE(arguments);
    expect_one_line(hae(arguments), 2);
  }
  EXPECT_EQ(read(folder_ / "t.h5"), before);
  EXPECT_FALSE(fs::exists(folder_ / "r"));
}

TEST_F(Cli, ImportTakesOnlyTheOptionsOfItsFormat) {
  for (const auto& [from, option, allowed] : std::vector<std::array<std::string, 3>>{
           {"npz", "--prompt 4", "allowed: --name, --group"},
           {"npz", "--image 0:2", "allowed: --name, --group"},
           {"npz", "--text-only", "allowed: --name, --group"},
           {"npz", "--kv-heads 2", "allowed: --name, --group"},
           {"npz", "--scale 1", "allowed: --name, --group"},
           {"npz", "--no-lock", "allowed: --name, --group"},
           {"attention-saver", "--scale 1", "takes --prompt, --image, --text-only, --batch"},
           {"attention-saver", "--window 4", "takes --prompt, --image, --text-only, --batch"},
           {"kvp", "--batch 0", "takes --prompt, --image, --text-only, --scale, --window"},
           {"kvp", "--kv-heads 2", "takes --prompt, --image, --text-only, --scale, --window"},
           {"kvp", "--head-dim 8", "takes --prompt, --image, --text-only, --scale, --window"},
           {"kvp", "--no-lock", "takes --prompt, --image, --text-only, --scale, --window"}}) {
    SCOPED_TRACE(from + " " + option);
    const Outcome outcome = hae(fmt::format("import in --from {} --out x.h5 {}", from, option));
    expect_one_line(outcome, 2);
    EXPECT_THAT(outcome.err,
                HasSubstr(option.substr(0, option.find(' ')) + " has no meaning with --from " + from));
    EXPECT_THAT(outcome.err, HasSubstr(allowed));
  }
}

TEST_F(Cli, ImportGuessesNeitherPromptNorPictures) {
  for (const char* from : {"attention-saver", "kvp"}) {
    const auto import = [&](const char* more) {
      return hae(fmt::format("import in --from {} --out x.h5 {}", from, more));
    };
    EXPECT_THAT(import("--text-only").err, HasSubstr("--prompt is missing"));
    for (const char* pictures : {"--prompt 4", "--prompt 4 --image 0:2 --text-only"}) {
      const Outcome outcome = import(pictures);
      expect_one_line(outcome, 2);
      EXPECT_THAT(outcome.err, HasSubstr("either --image START:END, once for each picture, or --text-only"));
    }
    for (const char* span :
         {"5", "5:", ":5", "5:7:9", "5:x", "x:5", "5-7", "1.5:2", "0:99999999999999999999"}) {
      const Outcome outcome = import(fmt::format("--prompt 4 --image {}", span).c_str());
      expect_one_line(outcome, 2);
      EXPECT_THAT(outcome.err, HasSubstr(fmt::format("'{}' is not START:END", span)));
    }
  }
}

TEST_F(Cli, ImportNeverWritesIntoTheDirectoryItReads) {
  fs::create_directories(folder_ / "sample" / "layer_000000");
  fs::create_directory_symlink("sample", folder_ / "link");
  for (const char* out : {"sample/x.h5", "sample/layer_000000/x.h5", "link/x.h5", "sample/../sample/x.h5"}) {
    const Outcome outcome = hae(fmt::format("import sample --from kvp --prompt 1 --text-only --out {}", out));
    expect_one_line(outcome, 2);
    EXPECT_THAT(outcome.err, HasSubstr("which is imported; choose another path"));
  }
  expect_one_line(hae("import sample --from kvp --prompt 1 --text-only --out samples.h5"), 3);
}

TEST_F(Cli, ASignalLeavesNoHalfWrittenFile) {
  const std::string command = fmt::format(
      "cd '{}' && {{ '{}' synth --kind uniform --out big.h5 --layers 99 --prompt 20000 >out 2>err & }} && "
      "sleep 0.4 && "
      "kill -TERM \\$! && wait \\$!; test \\$? -eq 143",
      folder_.string(), HAE_PROGRAM);
  EXPECT_EQ(std::system(fmt::format("bash -c \"{}\"", command).c_str()), 0)
      << "it ended before the signal came";
  EXPECT_FALSE(fs::exists(folder_ / "big.h5"));
  EXPECT_FALSE(fs::exists(folder_ / "big.h5.partial"));
}

TEST_F(Cli, AFullDiskIsOneLineAndLeavesNothing) {
  const std::string command = fmt::format(
      "cd '{}' && trap '' XFSZ && ulimit -f 100 && '{}' synth --kind uniform --out big.h5 >out 2>err",
      folder_.string(), HAE_PROGRAM);
  const int status = std::system(fmt::format("bash -c \"{}\"", command).c_str());
  EXPECT_EQ(WEXITSTATUS(status), 2);
  EXPECT_EQ(std::ranges::count(read(folder_ / "err"), '\n'), 1) << read(folder_ / "err");
  EXPECT_FALSE(fs::exists(folder_ / "big.h5"));
  EXPECT_FALSE(fs::exists(folder_ / "big.h5.partial"));
}

TEST_F(Cli, APolicyThatPrunesCanBeMatchedWhateverItsPrompt) {
  make_trace("t.h5");
  const Outcome outcome =
      hae("compare t.h5 --policy window:sinks=0,recent=20 --policy hae:sinks=4,r=0.9,alpha=2 --policy "
          "greedy:dap=threshold,r=0.5,alpha=2 --match mean");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
}

TEST_F(Cli, SummariesAverageGroupsAndGiveTheirInterval) {
  // Two sequences are two groups: the mean of two runs, and t(0.975, 1) = 12.7062047 times |x - y| / 2 either
  // way.
  make_trace("t.h5", "--sequences 2");
  ASSERT_EQ(hae("compare t.h5 --policy greedy:budget=20 --json r.json").code, 0);
  const auto result = nlohmann::json::parse(read(folder_ / "r.json"));
  const double x = result["runs"][0]["decode"]["missed_mass"]["mean"];
  const double y = result["runs"][1]["decode"]["missed_mass"]["mean"];
  const auto& figure = result["summary"][0]["decode.missed_mass.mean"];
  EXPECT_DOUBLE_EQ(figure["mean"].get<double>(), (x + y) / 2);
  EXPECT_EQ(figure["groups"], 2);
  EXPECT_NEAR(figure["interval95"][1].get<double>(), (x + y) / 2 + 12.7062047 * std::abs(x - y) / 2, 1e-6);
}

TEST_F(Cli, ImpossibleProtectionStopsBeforeAnythingIsWritten) {
  make_trace("t.h5");
  const Outcome outcome = hae("compare t.h5 --policy full --policy greedy:budget=4,sinks=4 --json r.json");
  expect_one_line(outcome, 2);
  EXPECT_THAT(outcome.err, HasSubstr("layer 0: sinks + recent = 5 exceeds the budget of 4"));
  EXPECT_FALSE(fs::exists(folder_ / "r.json"));
  EXPECT_EQ(outcome.out, "");
}

TEST_F(Cli, EverySubcommandsHelpHasAnExample) {
  for (const char* command :
       {"info", "check", "synth", "import", "policies", "replay", "compare", "stats", "memory"}) {
    const Outcome outcome = hae(std::string(command) + " --help");
    EXPECT_EQ(outcome.code, 0);
    EXPECT_THAT(outcome.out, HasSubstr(std::string("hae ") + command)) << command;
  }
}

TEST_F(Cli, ImportsHelpHasAnExampleOfEachFormat) {
  const Outcome outcome = hae("import --help");
  for (const char* from : {"--from npz --", "--from attention-saver --", "--from kvp --"}) {
    EXPECT_THAT(outcome.out, HasSubstr(from));
  }
}

TEST_F(Cli, PoliciesShowOptionsSourceAndFidelity) {
  EXPECT_THAT(hae("policies").out, HasSubstr("h2o/layerwise"));
  const Outcome outcome = hae("policies hae");
  for (const char* part : {"source", "fidelity", "arXiv 2602.02197", "max_evicted", "0.0015"}) {
    EXPECT_THAT(outcome.out, HasSubstr(part));
  }
}

}  // namespace
}  // namespace hae::testing
