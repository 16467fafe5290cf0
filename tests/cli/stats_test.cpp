#include <nlohmann/json.hpp>

#include <array>
#include <set>
#include <utility>

#include "tests/cli/cli.hpp"

// `hae stats` and `hae memory` as a user runs them.

namespace hae::testing {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using Index = std::int64_t;

class Stats : public Cli {
 protected:
  json parsed(const std::string& name) { return json::parse(read(folder_ / name)); }

  json stats(const std::string& arguments) {
    const Outcome outcome = hae("stats " + arguments + " --json s.json");
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    out_ = outcome.out;
    return parsed("s.json");
  }

  json memory(const std::string& arguments) {
    const Outcome outcome = hae("memory " + arguments + " --json m.json");
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    out_ = outcome.out;
    return parsed("m.json");
  }

  std::string out_;  ///< what the last command printed
};

TEST_F(Stats, WriteTheStatedSchema) {
  make_trace("t.h5", "--sequences 2");
  const json result = stats("t.h5 --r 0.5,2 --alpha 2");
  EXPECT_EQ(result["schema"], "hae.stats/1");
  EXPECT_TRUE(result["manifest"]["traces"][0].contains("sha256"));
  EXPECT_EQ(result["options"]["r"], json({0.5, 2.0}));
  // T = 56: ages up to 55, the bins 0, 1, 2, 3-4, 5-8, 9-16, 17-32, 33-64.
  EXPECT_EQ(result["options"]["ages"].size(), 8u);
  EXPECT_EQ(result["options"]["ages"][7], json({33, 64}));
  ASSERT_EQ(result["sequences"].size(), 2u);
  for (const json& sequence : result["sequences"]) {
    EXPECT_EQ(sequence["rows"], json({{"prompt", 40}, {"prompt_stored", 40}, {"decode", 16}}));
    EXPECT_EQ(sequence["visual_tokens"], 16);
    ASSERT_EQ(sequence["layers"].size(), 2u);
    for (const json& layer : sequence["layers"]) {
      for (const char* key :
           {"sparsity", "column_sums", "age", "broadcast", "masked_rows", "lowered_weights"}) {
        EXPECT_TRUE(layer.contains(key)) << key;
      }
      EXPECT_EQ(layer["age"]["visual"].size(), 8u);
      EXPECT_EQ(layer["broadcast"]["evicted"].size(), 2u);
    }
  }
  // One line a layer and one for all, in each table.
  EXPECT_THAT(out_, HasSubstr("\n0 "));
  EXPECT_THAT(out_, HasSubstr("\n1 "));
  EXPECT_THAT(out_, HasSubstr("\nall "));
}

TEST_F(Stats, AverageOverGroupsWithTheirInterval) {
  // Two sequences are two groups: half the width of the interval is t(0.975, 1) = 12.7062047 times |x - y|/2.
  make_trace("t.h5", "--sequences 2");
  const json result = stats("t.h5 --threshold 0.02");
  const auto share = [](const json& of) -> const json& {
    return of["layers"][1]["sparsity"]["decode"]["all"];
  };
  const double x = share(result["sequences"][0]);
  const double y = share(result["sequences"][1]);
  EXPECT_NE(x, y);
  const json& figure = share(result["summary"]);
  EXPECT_DOUBLE_EQ(figure["mean"].get<double>(), (x + y) / 2);
  EXPECT_EQ(figure["groups"], 2);
  EXPECT_NEAR(figure["interval95"][1].get<double>(), (x + y) / 2 + 12.7062047 * std::abs(x - y) / 2, 1e-6);
  const json one = stats("t.h5 --threshold 0.02 --sequence 1");
  EXPECT_EQ(one["sequences"].size(), 1u);
  EXPECT_EQ(share(one["summary"])["mean"], y);
  EXPECT_TRUE(share(one["summary"])["interval95"].is_null());
}

// The sets are those that the policy evicts when each layer decides for itself.
TEST_F(Stats, BroadcastIsWhatThePolicyWouldEvict) {
  make_trace("t.h5");
  const json result = stats("t.h5 --r 0.05,0.06 --alpha 0.2");
  Index differing = 0;
  for (std::size_t r = 0; r < 2; ++r) {
    const Outcome replayed = hae(
        fmt::format("replay t.h5 --events --policy hae:dap=threshold,broadcast=none,ddes=none,alpha=0.2,r={}",
                    result["options"]["r"][r].get<double>()));
    ASSERT_EQ(replayed.code, 0) << replayed.err;
    std::array<std::set<int>, 2> evicted;
    std::istringstream lines(replayed.out);
    for (std::string line; std::getline(lines, line);) {
      const json event = json::parse(line);
      evicted[event["layer"].get<std::size_t>()].insert(event["token"].get<int>());
    }
    ASSERT_FALSE(evicted[0].empty());
    for (std::size_t layer = 0; layer < 2; ++layer) {
      const json& broadcast = result["sequences"][0]["layers"][layer]["broadcast"];
      EXPECT_EQ(broadcast["evicted"][r], evicted[layer].size());
      const auto both = std::ranges::count_if(evicted[0], [&](int t) { return evicted[layer].contains(t); });
      EXPECT_DOUBLE_EQ(broadcast["shared"][r].get<double>(),
                       static_cast<double>(both) / static_cast<double>(evicted[0].size()));
      differing += evicted[layer] != evicted[0] ? 1 : 0;
    }
  }
  EXPECT_GT(differing, 0);
}

TEST_F(Stats, AreTheSameOnAnyNumberOfThreads) {
  make_trace("t.h5", "--sequences 3");
  const json one = stats("t.h5 --threads 1");
  const json many = stats("t.h5 --threads 7");
  EXPECT_EQ(one["sequences"], many["sequences"]);
  EXPECT_EQ(one["summary"], many["summary"]);
}

TEST_F(Stats, RefuseWhatIsNoThreshold) {
  make_trace("t.h5");
  for (const char* option : {"--threshold -1", "--alpha nan", "--r 0.1,inf", "--r x", "--sequence 7"}) {
    SCOPED_TRACE(option);
    expect_one_line(hae(fmt::format("stats t.h5 {}", option)), 2);
  }
  expect_one_line(hae("stats missing.h5"), 3);
  expect_one_line(hae("stats t.h5 --json t.h5"), 2);
}

TEST_F(Stats, MemoryOfAShapeIsAProduct) {
  // 2 · 32 · 32 · 128 · 2 = 524,288; eight of it make 4 MiB.
  const json shape =
      memory("--model llava-1.5-7b --tokens 1000 --published 4194304 --published 4000000")["shape"];
  EXPECT_EQ(shape["token_bytes"], 524288);
  EXPECT_EQ(shape["bytes"], 524288000);
  EXPECT_EQ(shape["published"][0]["ratio"], 8.0);
  for (const json& published : shape["published"]) {
    std::set<std::pair<int, int>> ways;
    for (const json& way : published["would_be"]) {
      ways.emplace(way["element_bytes"], way["sequences"]);
      EXPECT_NEAR(way["token_bytes"].get<double>(), published["token_bytes"].get<double>(),
                  0.05 * published["token_bytes"].get<double>());
    }
    for (const auto& way : {std::pair(1, 16), std::pair(2, 8), std::pair(4, 4), std::pair(8, 2)}) {
      EXPECT_TRUE(ways.contains(way)) << way.first;
    }
  }
  EXPECT_EQ(memory("--layers 3 --kv-heads 5 --head-dim 7 --element-bytes 4")["shape"]["token_bytes"], 840);
  // Grouped queries: 2 · 28 · 4 · 128 · 2.
  EXPECT_EQ(memory("--model qwen2-vl-7b")["shape"]["token_bytes"], 57344);
}

TEST_F(Stats, MemoryOverTimeIsWhatCompareReports) {
  make_trace("t.h5", "--sequences 2");
  const std::string policies =
      "--policy hae:r=0.03,alpha=0.2,budget=20,bin=4 --policy hae:dap=none,budget=12,lane=kv_head --policy "
      "full ";
  // The shape of the trace itself: 2 layers, 2 KV heads of 8 dimensions, float32.
  const json result = memory("t.h5 " + policies + "--layers 2 --kv-heads 2 --head-dim 8 --element-bytes 4");
  EXPECT_EQ(result["schema"], "hae.memory/1");
  ASSERT_EQ(hae("compare t.h5 --allow-unequal --json r.json " + policies).code, 0);
  const json compared = parsed("r.json");
  ASSERT_EQ(result["runs"].size(), 6u);
  for (std::size_t i = 0; i < 6; ++i) {
    const json& run = result["runs"][i];
    EXPECT_EQ(run["policy"], compared["runs"][i]["policy"]);
    Index total = 0;
    Index peak = 0;
    for (const json& bytes : run["bytes"]["by_step"]) {
      total += bytes.get<Index>();
      peak = std::max(peak, bytes.get<Index>());
    }
    for (const char* figure : {"mean", "peak", "final", "prefill"}) {
      EXPECT_EQ(run["bytes"][figure], compared["runs"][i]["bytes"][figure]) << figure;
      EXPECT_EQ(run["model_bytes"][figure], run["bytes"][figure]) << figure;
    }
    EXPECT_EQ(run["bytes"]["by_step"].size(), 16u);
    EXPECT_EQ(run["bytes"]["mean"], static_cast<double>(total) / 16);
    EXPECT_EQ(run["bytes"]["peak"], peak);
  }
  for (std::size_t p = 0; p < 3; ++p) {
    EXPECT_EQ(result["summary"][p]["bytes"]["mean"], compared["summary"][p]["bytes.mean"]);
  }
  // `full` holds P + s tokens at step s; two layers of 2 · 2 · 8 · 4 bytes a token.
  const json& full = result["summary"][2]["bytes"]["at_percent"];
  EXPECT_EQ(full[0]["mean"], 41 * 2 * 128);
  EXPECT_EQ(full[2]["mean"], 48 * 2 * 128);
  EXPECT_EQ(full[4]["mean"], 56 * 2 * 128);
  EXPECT_THAT(out_, HasSubstr("\nfull "));
}

TEST_F(Stats, MemoryAtAModelsShapeIsItsBytesForAsManyTokens) {
  make_trace("t.h5");
  const json run = memory("t.h5 --policy full --model llava-1.5-7b")["runs"][0];
  EXPECT_EQ(run["model_bytes"]["by_step"][0], 41.0 * 524288);
  EXPECT_EQ(run["model_bytes"]["prefill"], 40.0 * 524288);
  EXPECT_EQ(run["model_bytes"]["mean"], 48.5 * 524288);  // (41 + ... + 56) / 16
}

TEST_F(Stats, MemoryWithoutDecodeStepsOrShapeHasNulls) {
  ASSERT_EQ(hae("synth --kind uniform --out p.h5 --prompt 8 --tokens 8 --image-tokens 4").code, 0);
  const json result = memory("p.h5 --policy full");
  EXPECT_TRUE(result["shape"].is_null());
  EXPECT_TRUE(result["runs"][0]["model_bytes"].is_null());
  EXPECT_TRUE(result["runs"][0]["bytes"]["mean"].is_null());
  EXPECT_GT(result["runs"][0]["bytes"]["final"].get<Index>(), 0);
  EXPECT_TRUE(result["summary"][0]["bytes"]["at_percent"][2].is_null());
}

TEST_F(Stats, MemoryAsksForWhatItNeeds) {
  make_trace("t.h5");
  for (const char* arguments :
       {"t.h5", "--policy full", "--layers 3", "--tokens 5", "--published 5", "--model gpt",
        "--model qwen2-vl-7b --layers 3", "--layers 2 --kv-heads 2 --head-dim 8 --element-bytes 3",
        "t.h5 --policy nothing", "t.h5 --policy full --policy full"}) {
    SCOPED_TRACE(arguments);
    expect_one_line(hae(fmt::format("memory {}", arguments)), 2);
  }
  const Outcome models = hae("memory");
  EXPECT_EQ(models.code, 0);
  EXPECT_THAT(models.out, HasSubstr("llava-1.5-13b"));
}

}  // namespace
}  // namespace hae::testing
