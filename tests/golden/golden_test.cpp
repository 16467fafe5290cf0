#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "sim/weights.hpp"
#include "tests/golden/cases.hpp"
#include "tests/golden/tables.hpp"

namespace hae::testing {
namespace {

namespace fs = std::filesystem;

const fs::path kRoot = HAE_SOURCE_DIR;

void expect_as_committed(const GoldenFile& file) {
  const GoldenTable committed = read_golden(kRoot / file.path);
  const GoldenTable made = file.make({.root = kRoot});
  EXPECT_EQ(first_difference(committed, made), std::nullopt) << "if it is meant, run script/golden";
  EXPECT_EQ(made.lines.size(), committed.lines.size());
}

TEST(Golden, EveryRunIsAsCommitted) {
  expect_as_committed(golden_files()[0]);
}

TEST(Golden, EveryWeightIsAsCommitted) {
  expect_as_committed(golden_files()[1]);
}

/// Weights of a case's decode rows, all layers and heads, that `counts` holds for.
Index count_weights(const std::string& name, const std::function<bool(float)>& counts) {
  for (const GoldenCase& example : golden_cases()) {
    if (example.name != name) {
      continue;
    }
    const SequenceInfo& info = example.trace.info;
    MemorySequence sequence(example.trace);
    Index found = 0;
    for (Index layer = 0; layer < info.layers; ++layer) {
      const auto payload = sequence.layer(layer);
      LayerWeights weights(info, layer, info.tokens, *payload, NanRule::error, name);
      WeightBlock block;
      weights.decode({1, info.steps() + 1}, block);
      found += std::ranges::count_if(block.weights, counts);
    }
    return found;
  }
  ADD_FAILURE() << "no case is called " << name;
  return 0;
}

// Hundreds of weights each; without them the tables would show nothing about gradual underflow and ties.
TEST(GoldenCases, ReachWeightsThatUnderflowAndWeightsThatTie) {
  const auto subnormal = [](float w) { return std::fpclassify(w) == FP_SUBNORMAL; };
  EXPECT_GE(count_weights("weights-underflow", subnormal), 300);
  EXPECT_GE(count_weights("attention-subnormal", subnormal), 300);
  EXPECT_EQ(count_weights("head-dim-64", subnormal), 0);
  // Two layers, four heads, and 49 rows of 49 to 97 keys: every weight is exp(0).
  EXPECT_EQ(count_weights("equal-weights", [](float w) { return w == 1.0f; }), 2 * 4 * 49 * (49 + 97) / 2);
}

// A table of two runs, in which one digit changes at a time.
TEST(Golden, NamesTheFirstDifference) {
  const GoldenTable committed{
      {"trace\tsequence\tpolicy\tevictions\ttotal", "a\t0\tfull\t0\t0", "a\t1\tfull\t2\t0.5"}};
  EXPECT_EQ(first_difference(committed, committed), std::nullopt);

  GoldenTable made = committed;
  made.lines[2] = "a\t1\tfull\t2\t0.25";
  EXPECT_EQ(first_difference(committed, made), "a, sequence 1, full: total is 0.25, expected 0.5");

  made.lines[1] = "a\t0\tfull\t1\t0";
  EXPECT_EQ(first_difference(committed, made), "a, sequence 0, full: evictions is 1, expected 0");
}

TEST(Golden, ATableOfFewerSequencesAgreesAndAnUnknownRunDoesNot) {
  const GoldenTable committed{{"trace\tsequence\tpolicy\tevictions", "a\t0\tfull\t0", "a\t1\tfull\t2"}};
  EXPECT_EQ(first_difference(committed, {{committed.lines[0], committed.lines[2]}}), std::nullopt);
  EXPECT_EQ(first_difference(committed, {{committed.lines[0], "a\t2\tfull\t0"}}),
            "a, sequence 2, full: no such line in the committed table, or not in this place");
}

/// The committed runs of one sequence of boards-test.h5: policy -> column -> text.
std::map<std::string, std::map<std::string, std::string>> committed_runs(const std::string& sequence) {
  const auto split = [](const std::string& line) {
    std::vector<std::string> fields;
    std::istringstream text(line);
    for (std::string field; std::getline(text, field, '\t');) {
      fields.push_back(field);
    }
    return fields;
  };
  const GoldenTable table = read_golden(kRoot / "tests/golden/runs.tsv");
  const std::vector<std::string> columns = split(table.lines.front());
  std::map<std::string, std::map<std::string, std::string>> runs;
  for (const std::string& line : table.lines) {
    const std::vector<std::string> fields = split(line);
    if (fields[0] == "boards-test.h5" && fields[1] == sequence) {
      for (std::size_t i = 0; i < columns.size(); ++i) {
        runs[fields[2]][columns[i]] = fields[i];
      }
    }
  }
  return runs;
}

TEST(Golden, TheProgramPrintsTheSameFigures) {
  auto committed = committed_runs("3");
  ASSERT_GE(committed.size(), 10u);
  std::string policies;
  for (const auto& [policy, columns] : committed) {
    policies += fmt::format(" --policy '{}'", policy);
  }
  const fs::path result = fs::path(::testing::TempDir()) / fmt::format("golden-{}.json", ::getpid());
  const std::string command = fmt::format(
      "'{}' compare '{}' --sequence 3 --allow-unequal --json '{}'{} >{}.out", HAE_PROGRAM,
      (kRoot / "traces/data/boards-test.h5").string(), result.string(), policies, result.string());
  ASSERT_EQ(std::system(command.c_str()), 0) << command;

  const nlohmann::json runs = nlohmann::json::parse(std::ifstream(result))["runs"];
  fs::remove(result);
  fs::remove(result.string() + ".out");
  ASSERT_EQ(runs.size(), committed.size());
  for (const nlohmann::json& run : runs) {
    auto& columns = committed[run["policy"].get<std::string>()];
    EXPECT_EQ(run["log_sha256"], columns["log_sha256"]) << run["policy"];
    // Both texts read back to the same double, or one of them was not written in full.
    const auto same = [&](const nlohmann::json& figure, const char* column) {
      EXPECT_EQ(figure.get<double>(), std::stod(columns[column])) << run["policy"] << ": " << column;
    };
    same(run["evictions"], "evictions");
    same(run["pending_final"], "pending");
    same(run["missed_mass_total"], "missed_mass_total");
    same(run["decode"]["missed_mass"]["mean"], "missed_mass_mean");
    same(run["decode"]["output_error"]["mean"], "output_error_mean");
  }
}

}  // namespace
}  // namespace hae::testing
