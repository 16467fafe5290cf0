#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "testing/stream.hpp"
#include "tests/device/device_runs.hpp"
#include "tests/support/policy_specs.hpp"

// Logs of the device against the reference's on traces of chosen sizes and kinds.

namespace hae {
namespace {

using testing::device_runs;
using testing::MemoryTrace;
using testing::parity;
using testing::Stream;

/// A qkv trace: two pictures in a prompt that ends in text, two layers of grouped heads, one of them with a
/// window.
struct Kind {
  Index tokens = 0;
  Index prompt = 0;
  Index levels = 0;  ///< queries and keys take that many values; 1: all scores tie; 0: any value
};

MemoryTrace make_trace(const Kind& kind) {
  MemoryTrace trace;
  SequenceInfo& info = trace.info;
  info.name = "sized";
  info.group = info.name;
  info.payload = Payload::qkv;
  info.layers = 2;
  info.kv_heads = 2;
  info.query_heads = 4;
  info.head_dim = 8;
  info.element_bytes = 4;
  info.tokens = kind.tokens;
  info.prompt = kind.prompt;
  info.generated = info.steps() + 1;
  info.scale = 1.0 / std::sqrt(8.0);
  info.has_values = true;
  info.masks.resize(2);
  info.masks[1].window = std::max<Index>(2, kind.tokens * 3 / 4);
  info.masks[1].bidirectional = MaskRule::Bidirectional::image;
  info.image.assign(at(kind.tokens), -1);
  for (Index token = 1; token < kind.prompt * 3 / 4; ++token) {
    info.image[at(token)] = token < kind.prompt / 2 ? 0 : 1;
  }
  info.prompt_rows.resize(at(kind.prompt));
  std::iota(info.prompt_rows.begin(), info.prompt_rows.end(), 0);
  Stream stream(static_cast<std::uint64_t>(kind.tokens * 7 + kind.levels));
  const auto fill = [&](std::vector<std::vector<float>>& layers, Index heads) {
    for (Index layer = 0; layer < info.layers; ++layer) {
      std::vector<float>& numbers = layers.emplace_back(at(heads * info.tokens * 8));
      for (float& number : numbers) {
        number =
            kind.levels > 0 ? static_cast<float>(stream.below(kind.levels)) : 3.0f * stream.signed_unit();
      }
    }
  };
  fill(trace.queries, info.query_heads);
  fill(trace.keys, info.kv_heads);
  fill(trace.values, info.kv_heads);
  return trace;
}

/// Policies whose budgets follow the size of a trace: every kind of ranking and of eviction, both kinds of
/// lanes, bins that are empty, full, and of one token.
std::vector<std::string> specs_for(const SequenceInfo& info) {
  const std::string half = std::to_string(std::max<Index>(2, info.prompt / 2));
  return {
      "hae",
      "hae:r=0.5,alpha=0.5,budget=" + half,
      "hae:r=0.5,alpha=0.5,scope=image,heads=max,bin=1,budget=" + half,
      "hae:dap=mass,eps=0.2,effect=after,ddes=batch,score=mean,budget=" + half,
      "hae:dap=mass,eps=0.3,broadcast=none,ddes=none",
      "hae:dap=none,bin=1000,lane=kv_head,group=max,budget=" + half,
      "hae:r=0.2,alpha=2,max_evicted=3,scores=full,lane=kv_head,group=sum,bin=3,budget=" + half,
      "greedy",
      "greedy:score=mean,scores=full,budget=" + half,
      "h2o/layerwise:budget=" + half,
      "window:sinks=1,budget=" + half,
      "random:lane=kv_head,seed=3,budget=" + half,
      "snapkv:window=2,pool=max,budget=" + half,
      "snapkv:window=1,kernel=3,group=max,budget=" + half,
      "tova:budget=" + half,
      "full",
  };
}

class ParityOfSizes : public ::testing::TestWithParam<Index> {};

TEST_P(ParityOfSizes, OfAnyValuesAndOfTies) {
  const Index tokens = GetParam();
  const bool is_slow = tokens > 1000;  // So few steps there, and no ties, which smaller sizes have.
  const Index steps = is_slow ? 20 : tokens / 3;
  for (const Index levels : is_slow ? std::vector<Index>{0} : std::vector<Index>{0, 1, 2}) {
    const MemoryTrace trace = make_trace({tokens, std::max<Index>(1, tokens - steps), levels});
    for (const std::string& spec : specs_for(trace.info)) {
      if (testing::possible_run(trace, spec)) {
        EXPECT_EQ(parity(trace, spec), "") << tokens << " tokens, " << levels << " levels";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, ParityOfSizes, ::testing::Values(1, 2, 31, 32, 33, 255, 257, 1023, 1025));

TEST(Parity, OfManySequencesAtOnceAndOfFewAtATime) {
  const MemoryTrace a = make_trace({70, 50, 0});
  const MemoryTrace b = make_trace({33, 33, 0});
  const MemoryTrace c = make_trace({257, 200, 2});
  const std::vector<const MemoryTrace*> traces{&a, &b, &c};
  for (const std::string& spec : specs_for(b.info)) {
    // 6 MB hold one or two of these layers, 64 MB all of them.
    for (const Index memory : {Index{6} << 20, Index{64} << 20}) {
      const std::vector<device::DeviceRun> runs = device_runs(traces, spec, {.memory_bytes = memory});
      for (std::size_t i = 0; i < traces.size(); ++i) {
        EXPECT_EQ(parity(*traces[i], spec, runs[i]), "") << "sequence " << i << ", " << memory << " bytes";
      }
    }
  }
}

TEST(Parity, OfLayersThatFitRowByRowOnly) {
  // A block of 32 rows of this layer's 4 heads takes 4 * 32 * 1056 * 4 bytes = 0.5 MiB more than one row.
  const MemoryTrace trace = make_trace({1025, 1020, 0});
  EXPECT_EQ(parity(trace, "hae:dap=none,bin=4,budget=500", {.memory_bytes = Index{5000} << 10}), "");
}

TEST(Parity, OfSequencesOfDifferentShapes) {
  const MemoryTrace qkv = make_trace({40, 30, 0});
  const MemoryTrace attention = testing::attention_trace(
      {{{1}, {0.5, 0.5}, {0.25, 0.5, 0.25}, {0.25, 0.25, 0.25, 0.25}}}, 3, {-1, 0, -1, -1});
  const std::vector<const MemoryTrace*> traces{&attention, &qkv, &attention};
  const std::vector<device::DeviceRun> runs = device_runs(traces, "hae:r=0.9,alpha=2,bin=1,budget=1");
  for (std::size_t i = 0; i < traces.size(); ++i) {
    EXPECT_EQ(parity(*traces[i], "hae:r=0.9,alpha=2,bin=1,budget=1", runs[i]), "");
  }
}

TEST(DeviceReplay, NamesTheFirstLogitThatIsNotFinite) {
  MemoryTrace trace = make_trace({40, 30, 0});
  trace.keys[1][8 * 3] = std::numeric_limits<float>::infinity();
  std::string expected;
  try {
    (void)testing::run_all(trace, {"greedy:budget=20"});
  } catch (const TraceError& error) {
    expected = error.what();
  }
  EXPECT_THAT(expected, ::testing::HasSubstr("layer 1, head 0"));
  try {
    (void)device_runs({&trace}, "greedy:budget=20");
    FAIL() << "the device took a logit that is not finite";
  } catch (const TraceError& error) {
    EXPECT_EQ(error.what(), expected);
  }
  EXPECT_EQ(parity(trace, "greedy:budget=20", {.nan = NanRule::lowest}), "");
}

TEST(DeviceReplay, NamesTheFirstRecordedProbabilityThatIsWrong) {
  MemoryTrace trace = testing::attention_trace({{{1}, {0.5, 0.5}, {0.25, 0.5, 0.25}}}, 2, {-1, -1, -1});
  trace.attention[0][7] = std::numeric_limits<float>::quiet_NaN();  // row 2, key 1
  EXPECT_THROW((void)device_runs({&trace}, "greedy:budget=1"), TraceError);
  EXPECT_EQ(parity(trace, "greedy:budget=1", {.nan = NanRule::lowest}), "");
}

TEST(DeviceReplay, SaysHowMuchMemoryIsNeededAndWorksAfterwards) {
  const MemoryTrace trace = make_trace({257, 200, 0});
  try {
    (void)device_runs({&trace}, "greedy:budget=20", {.memory_bytes = 1000});
    FAIL() << "257 tokens fitted into 1000 bytes";
  } catch (const DeviceError& error) {
    EXPECT_THAT(error.what(), ::testing::ContainsRegex("needs [0-9]+ bytes, 1000 are free"));
  }
  try {
    const device::Buffer buffer(Index{1} << 62);
    FAIL() << "an allocation of 2^62 bytes succeeded";
  } catch (const DeviceError& error) {
    EXPECT_THAT(error.what(), ::testing::ContainsRegex("4611686018427387904 bytes needed, [0-9]+ free"));
  }
  EXPECT_EQ(parity(trace, "greedy:budget=20"), "");
}

TEST(DeviceReplay, RefusesAnImpossibleOption) {
  const MemoryTrace trace = make_trace({40, 30, 0});
  EXPECT_THROW((void)device_runs({&trace}, "hae:dap=none,budget=4,sinks=4,recent=1"), ConfigError);
  EXPECT_THROW((void)device_runs({&trace}, "adakv:budget=20"), ConfigError);
}

TEST(DeviceReplay, OfNothingIsNothing) {
  EXPECT_TRUE(device::replay({}, {}).empty());
}

}  // namespace
}  // namespace hae
