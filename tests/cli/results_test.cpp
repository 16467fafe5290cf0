#include <nlohmann/json.hpp>

#include <map>

#include "tests/cli/cli.hpp"

// Results that are kept, repeated and compared.

namespace hae::testing {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

class Results : public Cli {
 protected:
  Results() { make_trace("t.h5", "--sequences 3"); }

  /// Runs a comparison that must succeed.
  Outcome compared(const std::string& more) {
    const Outcome outcome =
        hae("compare t.h5 --policy hae:dap=none,budget=20,bin=4 --policy greedy --policy random:seed=7 "
            "--match mean " +
            more);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome;
  }

  json parsed(const std::string& name) { return json::parse(read(folder_ / name)); }

  /// Changes a result as a hand or another program might.
  template <typename Change>
  void edit(const std::string& name, const Change& change) {
    json result = parsed(name);
    change(result);
    std::ofstream(folder_ / name) << result.dump();
  }
};

TEST_F(Results, HoldTheBoundsAndNoPolicyBeatsThem) {
  compared("--json r.json");
  for (const json& run : parsed("r.json")["runs"]) {
    EXPECT_GE(run["optimal"], 0.0);
    EXPECT_DOUBLE_EQ(run["regret"].get<double>(),
                     run["missed_mass_total"].get<double>() - run["optimal"].get<double>());
    // 2 layers of 4 query heads; 16 rows each; a row is measured within (56/32 + 8) 2^-22.
    EXPECT_GE(run["regret"].get<double>(), -2 * 4 * 16 * 10 * 0x1p-22);
    EXPECT_LE(run["top_now"].get<double>(),
              run["decode"]["missed_mass"]["mean"].get<double>() + 10 * 0x1p-22);
    EXPECT_NEAR(run["optimal_mean"].get<double>() * 2 * 4 * 16, run["optimal"].get<double>(), 1e-9);
  }
  compared("--json without.json --no-optimal");
  for (const json& run : parsed("without.json")["runs"]) {
    EXPECT_TRUE(run["optimal"].is_null());
    EXPECT_TRUE(run["regret"].is_null());
    EXPECT_FALSE(run["top_now"].is_null());
  }
}

TEST_F(Results, SayWhichKindsOfTokensWereEvicted) {
  // 56 tokens, a prompt of 40 with a picture at [12, 28); each in the lanes of 2 layers.
  const std::map<std::string, int> in_lanes = {
      {"visual", 32}, {"text_before", 24}, {"text_after", 24}, {"generated", 32}};
  compared("--json r.json --csv r.csv");
  const json result = parsed("r.json");
  for (const json& run : result["runs"]) {
    int evicted = 0;
    for (const auto& [kind, tokens] : in_lanes) {
      const int lost = run["evicted_kinds"][kind];
      evicted += lost;
      EXPECT_EQ(run["kept_kinds"][kind], static_cast<double>(tokens - lost) / tokens) << kind;
    }
    EXPECT_EQ(evicted, run["evictions"]);
  }
  double visual = 0;
  for (const std::size_t sequence : {0, 3, 6}) {
    visual += result["runs"][sequence]["evicted_kinds"]["visual"].get<double>();
  }
  EXPECT_DOUBLE_EQ(result["summary"][0]["evicted_kinds.visual"]["mean"].get<double>(), visual / 3);
  EXPECT_THAT(read(folder_ / "r.csv"), HasSubstr(",evicted_kinds.visual,"));
  EXPECT_THAT(read(folder_ / "r.csv"), HasSubstr(",kept_kinds.generated,"));
}

TEST_F(Results, SayHowAlikeTheTokensAreThatTwoPoliciesKeep) {
  compared("--json r.json");
  const json result = parsed("r.json");
  const json& overlap = result["overlap"];
  EXPECT_EQ(overlap["policies"], json({"hae:dap=none,budget=20,bin=4", "greedy", "random:seed=7"}));
  EXPECT_EQ(overlap["groups"], 3);
  for (std::size_t a = 0; a < 3; ++a) {
    for (std::size_t b = 0; b < 3; ++b) {
      double sum = 0;
      for (const std::size_t sequence : {0, 3, 6}) {
        sum += result["runs"][sequence + a]["overlap"][b].get<double>();
      }
      EXPECT_DOUBLE_EQ(overlap["mean"][a][b].get<double>(), sum / 3);
      EXPECT_LE(overlap["interval95"][a][b][0], overlap["mean"][a][b]);
      EXPECT_GE(overlap["interval95"][a][b][1], overlap["mean"][a][b]);
      EXPECT_EQ(overlap["mean"][a][b], overlap["mean"][b][a]);
    }
    EXPECT_EQ(overlap["mean"][a][a], 1.0);
  }
  // Greedy keeps what HAE keeps but for its bin; random choice does not.
  EXPECT_GT(overlap["mean"][0][1], overlap["mean"][0][2]);
}

TEST_F(Results, ShowKindsAndOverlapWhenAsked) {
  const auto lines = [](const std::string& text) { return std::ranges::count(text, '\n'); };
  const std::string plain = compared("").out;
  const std::string kinds = compared("--kinds").out;
  const std::string overlap = compared("--overlap").out;
  // A blank line, a title, a heading and three policies each; nothing else changes.
  EXPECT_EQ(lines(kinds), lines(plain) + 6);
  EXPECT_EQ(lines(overlap), lines(plain) + 6);
  EXPECT_THAT(kinds, ::testing::StartsWith(plain));
  EXPECT_THAT(overlap, ::testing::StartsWith(plain));
  EXPECT_THAT(kinds, HasSubstr("evicted visual  text before  text after  generated  kept visual"));
  EXPECT_THAT(overlap, HasSubstr("\n3 random:seed=7 "));
  EXPECT_EQ(compared("--kinds --overlap").out, kinds + overlap.substr(plain.size()));
}

TEST_F(Results, AreHeldToRulesAboutKinds) {
  const std::string command = "compare t.h5 --policy random:budget=20 --no-optimal --fail-if ";
  EXPECT_EQ(hae(command + "'kept_kinds.visual>0.99'").code, 0);
  expect_one_line(hae(command + "'kept_kinds.visual<0.99'"), 1);
}

TEST_F(Results, AreTheSameOnAnyNumberOfThreads) {
  compared("--threads 1 --json one.json");
  for (const char* threads : {"2", "7"}) {
    compared(fmt::format("--threads {} --json many.json", threads));
    EXPECT_EQ(parsed("one.json")["runs"], parsed("many.json")["runs"]);
    EXPECT_EQ(parsed("one.json")["summary"], parsed("many.json")["summary"]);
  }
}

TEST_F(Results, TheFirstErrorIsTheSameOnAnyNumberOfThreads) {
  make_trace("short.h5", "--sequences 1");
  // Sequences of t.h5 can be protected so, and of the second file all cannot.
  const std::string command = "compare t.h5 short.h5 --policy hae:budget=3,sinks=2,recent=2 --threads ";
  const Outcome one = hae(command + "1");
  expect_one_line(one, 2);
  for (const char* threads : {"2", "7"}) {
    EXPECT_EQ(hae(command + threads).err, one.err);
  }
}

TEST_F(Results, RepeatThemselvesFromAFolderAFileOrALog) {
  compared("--out kept --json r.json");
  EXPECT_EQ(parsed("kept/result.json"), parsed("r.json"));
  for (const char* result : {"kept", "r.json", "kept/runs.h5"}) {
    SCOPED_TRACE(result);
    const Outcome again = hae(fmt::format("rerun {}", result));
    EXPECT_EQ(again.code, 0) << again.err;
    EXPECT_THAT(again.out, HasSubstr("identical: 9 logs"));
  }
  ASSERT_EQ(hae("replay t.h5 --policy hae:lane=kv_head,budget=16 --sequence 1 --out run.h5").code, 0);
  EXPECT_THAT(hae("rerun run.h5").out, HasSubstr("identical: 1 log"));
}

TEST_F(Results, FindTheirTracesByTheirBytes) {
  compared("--out kept");
  fs::rename(folder_ / "t.h5", folder_ / "moved.h5");
  const Outcome lost = hae("rerun kept");
  expect_one_line(lost, 3);
  EXPECT_THAT(lost.err,
              HasSubstr("t.h5: is not there, and kept was made from it; name the right file with --trace"));
  EXPECT_EQ(hae("rerun kept --trace moved.h5").code, 0);
  make_trace("t.h5", "--sequences 3 --seed 5");
  const Outcome other = hae("rerun kept");
  expect_one_line(other, 3);
  EXPECT_THAT(other.err, HasSubstr("has changed"));
  const Outcome foreign = hae("rerun kept --trace t.h5");
  expect_one_line(foreign, 2);
  EXPECT_THAT(foreign.err, HasSubstr("was made from no such bytes"));
}

TEST_F(Results, SayWhatDiffers) {
  compared("--json r.json --out kept");
  edit("r.json", [](json& result) { result["runs"][4]["evictions"] = 1; });
  const Outcome figure = hae("rerun r.json");
  expect_one_line(figure, 1);
  EXPECT_THAT(figure.err, HasSubstr("sequence 'heavy-hitters-1', policy greedy: evictions was 1, is "));

  edit("r.json", [](json& result) { result["runs"][0]["log_sha256"] = std::string(64, '0'); });
  EXPECT_THAT(hae("rerun r.json").err, HasSubstr("policy hae:dap=none,budget=20,bin=4: another log"));

  // What is missing, what is too much, and what summarises differs too.
  const auto differs = [&](const auto& change, const char* what) {
    compared("--json r.json");
    edit("r.json", change);
    const Outcome outcome = hae("rerun r.json");
    expect_one_line(outcome, 1);
    EXPECT_THAT(outcome.err, HasSubstr(what));
  };
  differs([](json& result) { result["runs"][0].erase("tokens"); }, "tokens was not stored");
  differs([](json& result) { result["runs"][0]["decode"].erase("missed_mass"); },
          "decode.missed_mass was not stored");
  differs([](json& result) { result["runs"][0]["better"] = 1; }, "better was stored, and is unknown");
  differs([](json& result) { result["summary"][1]["events"]["mean"] = 1; },
          "summary[1]: events.mean was 1, is ");
  differs([](json& result) { result["summary"].erase(2); }, "summary[2]: another number of policies");
  differs([](json& result) { result["runs"][0]["overlap"][1] = 2; }, "overlap was [1.0,2,");
  differs([](json& result) { result["overlap"]["mean"][0][0] = 2; }, "overlap.mean was [[2,");

  edit("kept/result.json", [](json& result) { result["runs"][0]["log_sha256"] = std::string(64, '0'); });
  const Outcome mixed = hae("rerun kept");
  expect_one_line(mixed, 3);
  EXPECT_THAT(mixed.err, HasSubstr("are of different runs"));
}

TEST_F(Results, AreNotTakenFromAnythingElse) {
  compared("--json r.json");
  std::ofstream(folder_ / "text.json") << "not json";
  std::ofstream(folder_ / "list.json") << "[1, 2]";
  std::ofstream(folder_ / "other.json") << R"({"schema": "other/1"})";
  std::ofstream(folder_ / "hollow.json")
      << R"({"schema": "hae.compare/1", "manifest": {"traces": []}, "runs": [], "summary": []})";
  std::ofstream(folder_ / "deep.json") << std::string(1'000'000, '[');
  fs::create_directory(folder_ / "empty");
  for (const char* name :
       {"text.json", "list.json", "other.json", "hollow.json", "deep.json", "empty", "missing", "t.h5"}) {
    SCOPED_TRACE(name);
    expect_one_line(hae(fmt::format("rerun {}", name)), 3);
    expect_one_line(hae(fmt::format("compare t.h5 --policy full --baseline {} --fail-if 'events>2x'", name)),
                    3);
  }
}

TEST_F(Results, EditedByHandAreBadInputNotAFaultOfTheProgram) {
  compared("--json r.json");
  const std::string written = read(folder_ / "r.json");
  const auto rerun = [&](const auto& change) {
    std::ofstream(folder_ / "edited.json") << written;
    edit("edited.json", change);
    return hae("rerun edited.json");
  };
  for (const json& value : {json(), json(7), json::array(), json::object()}) {
    SCOPED_TRACE(value.dump());
    expect_one_line(rerun([&](json& result) { result["schema"] = value; }), 3);
    expect_one_line(rerun([&](json& result) { result["manifest"]["policies"] = value; }), 3);
    expect_one_line(rerun([&](json& result) { result["manifest"]["logs"] = {value}; }), 3);
    expect_one_line(rerun([&](json& result) { result["runs"][0]["log_sha256"] = value; }), 1);
    // Who made a result is said, not needed.
    EXPECT_EQ(rerun([&](json& result) { result["manifest"]["version"] = value; }).code, 0);
  }
  std::ofstream(folder_ / "deep.json") << std::string(100'000, '[') << std::string(100'000, ']');
  const Outcome deep = hae("rerun deep.json");
  expect_one_line(deep, 3);
  EXPECT_THAT(deep.err, HasSubstr("nested more than 64 deep"));
}

TEST_F(Results, AreKeptWholeOrNotAtAll) {
  const std::string impossible = "compare t.h5 --policy hae:sinks=90 --out kept";
  expect_one_line(hae(impossible), 2);
  EXPECT_FALSE(fs::exists(folder_ / "kept"));

  compared("--out kept");
  const std::string before = read(folder_ / "kept/result.json");
  expect_one_line(hae(impossible), 2);
  EXPECT_EQ(read(folder_ / "kept/result.json"), before);
  EXPECT_EQ(hae("rerun kept").code, 0);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_ / "kept"), fs::directory_iterator()), 2);

  expect_one_line(hae("compare t.h5 --policy hae:sinks=90 --out a/b/c"), 2);
  EXPECT_FALSE(fs::exists(folder_ / "a"));
  fs::create_directories(folder_ / "full/result.json");
  expect_one_line(hae("compare t.h5 --policy full --out full"), 2);
  EXPECT_TRUE(fs::exists(folder_ / "full/result.json"));

  std::ofstream(folder_ / "file") << "x";
  expect_one_line(hae("compare t.h5 --policy full --out file"), 2);
  expect_one_line(hae("compare t.h5 --policy full --out kept --json kept/result.json"), 2);
  fs::copy_file(folder_ / "t.h5", folder_ / "kept/runs.h5", fs::copy_options::overwrite_existing);
  expect_one_line(hae("compare kept/runs.h5 --policy full --out kept"), 2);
}

TEST_F(Results, NeverReplaceTheLogsTheyAreMadeFrom) {
  compared("--out kept");
  const std::string before = read(folder_ / "kept/runs.h5");
  expect_one_line(hae("compare t.h5 --policy log:path=kept/runs.h5 --policy full --out kept"), 2);
  expect_one_line(hae("replay t.h5 --policy log:path=kept/runs.h5 --out kept/runs.h5"), 2);
  EXPECT_EQ(read(folder_ / "kept/runs.h5"), before);
}

TEST_F(Results, AreWrittenAsXmlWhateverAPolicyIsCalled) {
  compared("--out kept");
  // A control character, a byte that is no UTF-8, and U+FFFF: XML 1.0 has a place for none of them.
  fs::copy_file(folder_ / "kept/runs.h5", folder_ / "a\x01\xFF\xEF\xBF\xBF<b.h5");
  const Outcome outcome =
      hae("compare t.h5 --policy log:path='a\x01\xFF\xEF\xBF\xBF<b.h5' --policy full --allow-unequal --junit "
          "j.xml");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(read(folder_ / "j.xml"),
              HasSubstr("classname=\"log:path=a\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD&lt;b.h5\""));
}

TEST_F(Results, AStoredLogIsAPolicyLikeAnyOther) {
  compared("--out kept --json r.json");
  const Outcome outcome = hae(
      "compare t.h5 --policy log:path=kept/runs.h5,index=1 --policy full --allow-unequal --json log.json");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json runs = parsed("r.json")["runs"];
  const json logged = parsed("log.json")["runs"];
  for (std::size_t sequence = 0; sequence < 3; ++sequence) {
    const json& then = runs[3 * sequence + 1];
    const json& now = logged[2 * sequence];
    for (const char* figure : {"tokens", "bytes", "decode", "missed_mass_total", "evictions", "events",
                               "moved", "log_sha256", "top_now", "per_layer"}) {
      EXPECT_EQ(then[figure], now[figure]) << figure;
    }
    EXPECT_EQ(now["options"]["log"], "greedy");
  }
  expect_one_line(hae("replay t.h5 --policy log"), 2);
  expect_one_line(hae("replay t.h5 --policy log:path=kept/runs.h5,index=3"), 2);
  expect_one_line(hae("replay t.h5 --policy log:path=missing.h5"), 3);
  make_trace("other.h5", "--sequences 3 --seed 5");
  const Outcome foreign = hae("replay other.h5 --policy log:path=kept/runs.h5");
  expect_one_line(foreign, 3);
  EXPECT_THAT(foreign.err, HasSubstr("holds no run of sequence 'heavy-hitters-0' of a trace with SHA-256"));
  EXPECT_THAT(hae("policies log").out, HasSubstr("fidelity"));
}

TEST_F(Results, AreHeldToABaseline) {
  compared("--json old.json");
  const Outcome same = compared(
      "--baseline old.json --fail-if 'missed_mass.mean>1.0x' --fail-if 'hae:events>=10.5' --junit j.xml");
  EXPECT_THAT(same.out, HasSubstr("ok: missed_mass.mean>1.0x (greedy: "));
  // Three checks of missed mass, one of events for hae alone (two layers flush five times), three of bytes.
  EXPECT_THAT(read(folder_ / "j.xml"), HasSubstr(R"(tests="7" failures="0")"));

  compared("--out kept");
  expect_one_line(hae("compare t.h5 --policy greedy --baseline kept --fail-if 'events>1x' --out kept"), 2);
  EXPECT_THAT(compared("--baseline kept --fail-if 'missed_mass.mean>1.0 x'").out, HasSubstr("ok: "));

  edit("old.json", [](json& result) { result["summary"][1]["decode.missed_mass.mean"]["mean"] = 1e-3; });
  const Outcome worse =
      hae("compare t.h5 --policy hae:dap=none,budget=20,bin=4 --policy greedy --policy random:seed=7 --match "
          "mean "
          "--baseline old.json --fail-if 'missed_mass.mean > 1.05x' --junit j.xml --json new.json");
  expect_one_line(worse, 1);
  EXPECT_THAT(worse.err, HasSubstr("1 of 6 checks failed, first 'missed_mass.mean > 1.05x' of greedy"));
  EXPECT_THAT(worse.out, HasSubstr("FAILED: missed_mass.mean > 1.05x (greedy: "));
  EXPECT_THAT(read(folder_ / "j.xml"),
              HasSubstr(R"(<testcase classname="greedy" name="missed_mass.mean > 1.05x">)"));
  EXPECT_THAT(read(folder_ / "j.xml"), HasSubstr(R"(failures="1")"));
  EXPECT_TRUE(fs::exists(folder_ / "new.json"));  // A result is written also when the answer is no.

  edit("old.json", [](json& result) { result["summary"][1]["decode.missed_mass.mean"] = nullptr; });
  const Outcome null =
      hae("compare t.h5 --policy greedy:budget=20 --policy full --baseline old.json --fail-if "
          "'greedy:missed_mass.mean>2x'");
  expect_one_line(null, 2);  // greedy:budget=20 was not measured then
}

TEST_F(Results, ARuleForNoPolicyIsRefusedBeforeAnyWork) {
  compared("--json old.json");
  std::ofstream(folder_ / "bad.h5") << read(folder_ / "t.h5").substr(0, 2000);
  // Neither the damaged trace nor the output is touched when the rule cannot mean anything.
  for (const char* rule :
       {"--fail-if 'h2o:missed_mass.mean>0.5'", "--baseline old.json --fail-if 'events>2x'"}) {
    SCOPED_TRACE(rule);
    expect_one_line(hae(fmt::format("compare bad.h5 --policy full {}", rule)), 2);
  }
}

TEST_F(Results, AreHeldToRulesThatMeanSomething) {
  compared("--json old.json");
  for (const char* rules :
       {"--fail-if missed_mass.mean", "--fail-if 'colour>1'", "--fail-if 'missed_mass.mean>one'",
        "--fail-if 'missed_mass.mean>'", "--fail-if 'missed_mass.mean>nan'",
        "--fail-if 'missed_mass.mean>1.05x'", "--fail-if 'h2o:missed_mass.mean>0.5'", "--baseline old.json",
        "--baseline old.json --fail-if 'events>1'"}) {
    SCOPED_TRACE(rules);
    expect_one_line(hae(fmt::format("compare t.h5 --policy greedy:budget=20 {}", rules)), 2);
  }
  make_trace("other.h5", "--seed 5");
  const Outcome other = hae("compare other.h5 --policy greedy --baseline old.json --fail-if 'events>1x'");
  expect_one_line(other, 2);
  EXPECT_THAT(other.err, HasSubstr("other traces"));
  EXPECT_EQ(hae("compare t.h5 --policy greedy:budget=20 --fail-if 'missed_mass.max<=0.01'").code, 0);
  EXPECT_EQ(hae("compare t.h5 --policy greedy:budget=20 --fail-if 'missed_mass.max>=0.01'").code, 1);
}

}  // namespace
}  // namespace hae::testing
