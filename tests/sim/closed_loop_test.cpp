#include "sim/closed_loop.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "reference/policies.hpp"
#include "testing/memory_trace.hpp"

namespace hae {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::MemoryTrace;
using testing::ModelRows;

/// Two layers of one head of one dimension, prompt `text picture picture text`, two decode steps. Queries are
/// 0, so every row gives the same weight to each of its keys; token j has the value 2^j.
MemoryTrace uniform_trace() {
  MemoryTrace trace;
  trace.info.name = "uniform";
  trace.info.layers = 2;
  trace.info.query_heads = 1;
  trace.info.kv_heads = 1;
  trace.info.head_dim = 1;
  trace.info.tokens = 6;
  trace.info.prompt = 4;
  trace.info.generated = 3;
  trace.info.has_values = true;
  trace.info.masks.resize(2);
  trace.info.image = {-1, 0, 0, -1, -1, -1};
  trace.info.prompt_rows = {0, 1, 2, 3};
  for (int layer = 0; layer < 2; ++layer) {
    trace.queries.push_back({0, 0, 0, 0, 0, 0});
    trace.keys.push_back({1, 1, 1, 1, 1, 1});
    trace.values.push_back({1, 2, 4, 8, 16, 32});
  }
  return trace;
}

template <typename Error, typename Call>
void expect_message(const Call& call, const std::string& part) {
  try {
    call();
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

/// Prunes all of the second layer's prompt. No policy of the table prunes text; somebody's own may.
struct Everything final : Policy {
  struct State final : hae::Run {
    Decision prune(Index layer, const LayerCache& cache) override {
      Decision decision;
      for (Index token = 0; layer == 0 && token < cache.joined(); ++token) {
        decision.evict.push_back({1, Evict::kEveryLane, token, std::nullopt});
      }
      return decision;
    }
    std::unique_ptr<LayerDecode> decode(Index) override { return nullptr; }
    [[nodiscard]] Limits limits(Index, Index) const override { return {}; }
  };
  [[nodiscard]] std::string spec() const override { return "everything"; }
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> options() const override { return {}; }
  [[nodiscard]] Needs needs(const SequenceInfo&, Index) const override { return {}; }
  [[nodiscard]] std::unique_ptr<hae::Run> begin(const SequenceInfo&) const override {
    return std::make_unique<State>();
  }
};
TEST(ClosedLoop, NamesWhatLeftWithinALayerBeforeItsPrefill) {
  const MemoryTrace trace = uniform_trace();
  // Row 3 gives 1/4 to each of tokens 0..3, so A_1 = A_2 = 1/4 and A_V = 1/2. r·A_V = 0.4 > 1/4: both leave.
  ClosedLoop loop(trace.info, reference::make_policy("hae:r=0.8,alpha=1,ddes=none"), NanRule::error, "model");
  EXPECT_TRUE(loop.absent(0).empty());
  loop.prefill(0, ModelRows(trace, 0, {0, 1, 2, 3}).rows);
  EXPECT_THAT(loop.absent(1), ElementsAre(1, 2));
  EXPECT_EQ(loop.missing(0), 2);
  EXPECT_FALSE(loop.cache(0).is_resident(0, 1));
  loop.prefill(1, ModelRows(trace, 1, {0, 3}).rows);
  for (Index layer = 0; layer < 2; ++layer) {
    loop.step(layer, ModelRows(trace, layer, {4}).rows);
  }
  const ClosedLoop::Finished finished = loop.finish();
  EXPECT_EQ(testing::brief(finished.result.log), "0/0/-1/1 0/0/-1/2 0/1/-1/1w 0/1/-1/2w");
  EXPECT_EQ(finished.info.tokens, 5);
  // Layer 0: the row of token 4 would have given 2/5 to tokens 1 and 2. Layer 1 never had them.
  EXPECT_THAT(finished.result.decode.all(Metric::missed_mass), ElementsAre(double(2.0f) / double(5.0f), 0.0));
  // Layer 0: o = 31/5, o' = (1 + 8 + 16)/3. Layer 1: nothing is missing.
  EXPECT_NEAR(finished.result.decode.all(Metric::output_error)[0], 25.0 / 3 - 31.0 / 5, 1e-6);
  EXPECT_EQ(finished.result.decode.all(Metric::output_error)[1], 0.0);
}

TEST(ClosedLoop, TakesLayersAndStepsInOrderOnly) {
  const MemoryTrace trace = uniform_trace();
  ClosedLoop loop(trace.info, reference::make_policy("full"), NanRule::error, "model");
  const ModelRows prompt(trace, 0, {0, 1, 2, 3});
  const ModelRows row(trace, 0, {4});
  expect_message<ContractViolation>([&] { (void)loop.absent(1); }, "not known before");
  expect_message<ContractViolation>([&] { (void)loop.cache(0); }, "no cache before its prefill");
  expect_message<ContractViolation>([&] { loop.prefill(1, prompt.rows); }, "expected layer 0 of 2");
  loop.prefill(0, prompt.rows);
  expect_message<ContractViolation>([&] { loop.step(0, row.rows); }, "before the prefill of all 2 layers");
  expect_message<ContractViolation>([&] { loop.finish(); }, "the prefill of all layers is not over");
  loop.prefill(1, prompt.rows);
  expect_message<ContractViolation>([&] { loop.prefill(2, prompt.rows); }, "prefill of layer 2");
  loop.step(0, row.rows);
  expect_message<ContractViolation>([&] { loop.finish(); }, "different numbers of decode steps");
  loop.step(1, row.rows);
  EXPECT_EQ(loop.finish().info.tokens, 5);
  expect_message<ContractViolation>([&] { loop.finish(); }, "finished already");
  expect_message<ContractViolation>([&] { loop.step(0, row.rows); }, "finished already");
}

TEST(ClosedLoop, RefusesMoreStepsThanAnnounced) {
  const MemoryTrace trace = uniform_trace();
  ClosedLoop loop(trace.info, reference::make_policy("full"), NanRule::error, "model");
  for (Index layer = 0; layer < 2; ++layer) {
    loop.prefill(layer, ModelRows(trace, layer, {0, 1, 2, 3}).rows);
  }
  const ModelRows row(trace, 0, {4});
  loop.step(0, row.rows);
  loop.step(0, row.rows);
  expect_message<ConfigError>([&] { loop.step(0, row.rows); }, "outgrows the 6 tokens that were announced");
}

TEST(ClosedLoop, RefusesRowsOfAnotherShape) {
  const MemoryTrace trace = uniform_trace();
  ClosedLoop loop(trace.info, reference::make_policy("full"), NanRule::error, "model");
  expect_message<ContractViolation>(
      [&] {
        loop.prefill(0, ModelRows(trace, 0, {0, 1, 3}).rows);
      },
      "queries [1, 4, 1], keys and values [1, 4, 1]");
}

TEST(ClosedLoop, NamesThePlaceOfANumberThatIsNotFinite) {
  for (const auto member : {&MemoryTrace::queries, &MemoryTrace::keys, &MemoryTrace::values}) {
    MemoryTrace trace = uniform_trace();
    (trace.*member)[0][2] = std::numeric_limits<float>::quiet_NaN();
    ClosedLoop loop(trace.info, reference::make_policy("full"), NanRule::error, "model");
    const ModelRows prompt(trace, 0, {0, 1, 2, 3});
    expect_message<TraceError>([&] { loop.prefill(0, prompt.rows); },
                               member == &MemoryTrace::queries ? "layer 0, head 0, row 2" : "token 2");
  }
}

TEST(ClosedLoop, RefusesAPolicyThatEmptiesALayersPrefill) {
  const MemoryTrace trace = uniform_trace();
  ClosedLoop loop(trace.info, std::make_shared<Everything>(), NanRule::error, "model");
  loop.prefill(0, ModelRows(trace, 0, {0, 1, 2, 3}).rows);
  EXPECT_THAT(loop.absent(1), ElementsAre(0, 1, 2, 3));
  expect_message<ContractViolation>([&] { loop.prefill(1, ModelRows(trace, 1, {0}).rows); },
                                    "every prompt token left");
}

}  // namespace
}  // namespace hae
