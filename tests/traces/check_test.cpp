#include "traces/check.hpp"

#include <cmath>
#include <limits>

#include "tests/traces/fixtures.hpp"

namespace hae::traces::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Uniform causal rows: the query at position i gives each of its i + 1 keys 1 / (i + 1).
std::vector<float> uniform_head(const SequenceInfo& info, LayerArray array) {
  std::vector<float> values;
  const bool prompt = array == LayerArray::prompt;
  for (Index query = prompt ? 0 : info.prompt; query < (prompt ? info.prompt : info.tokens); ++query) {
    for (Index key = 0; key < (prompt ? info.prompt : query + 1); ++key) {
      values.push_back(key <= query ? 1.0F / static_cast<float>(query + 1) : 0.0F);
    }
  }
  return values;
}

/// Writes a sound attention trace in which `spoil` changes one head.
struct Spoil {
  Index layer = 0;
  LayerArray array = LayerArray::prompt;
  Index head = 0;
  std::size_t element = 0;
  float value = 0;
};

CheckReport check_attention(const std::vector<Spoil>& spoils, FloatType type = FloatType::float32,
                            SequenceInfo info = small_attention(), Index most = 10) {
  const Scratch scratch;
  TraceWriter writer(scratch / "trace.h5", {});
  writer.begin_sequence(info, {}, type);
  for (Index layer = 0; layer < info.layers; ++layer) {
    for (const LayerArray array : arrays_of(info)) {
      for (Index head = 0; head < heads_of(info, array); ++head) {
        std::vector<float> values =
            array == LayerArray::values ? std::vector<float>(24, 1) : uniform_head(info, array);
        for (const Spoil& spoil : spoils) {
          if (spoil.layer == layer && spoil.array == array && spoil.head == head) {
            values[spoil.element] = spoil.value;
          }
        }
        writer.write_head(layer, array, head, values);
      }
    }
  }
  writer.finish();
  TraceFile trace(scratch / "trace.h5");
  return check_trace(trace, most);
}

void expect_one(const CheckReport& report, const std::string& words) {
  ASSERT_EQ(report.total, 1);
  EXPECT_NE(report.violations.at(0).find(words), std::string::npos) << report.violations[0];
}

TEST(Check, FindsNothingInASoundTrace) {
  const CheckReport report = check_attention({});
  EXPECT_EQ(report.total, 0);
  EXPECT_TRUE(report.violations.empty());
  EXPECT_EQ(report.rows, 2 * 4 * 6);  // layers * query heads * positions
  EXPECT_EQ(report.masked_rows, 0);
}

TEST(Check, NamesSequenceLayerHeadAndRow) {
  // Element 9 of the prompt is row 2, key 1: 1/3 becomes 0.5.
  expect_one(check_attention({{1, LayerArray::prompt, 3, 9, 0.5F}}),
             "sequence 0 'small', layer 1, query head 3, row 2: sums to 1.16666");
  // The second decode row, position 5, begins at element 5.
  expect_one(check_attention({{0, LayerArray::decode, 2, 5 + 4, kNan}}),
             "layer 0, query head 2, row 5: key 4 has weight NaN");
}

TEST(Check, FindsWeightsThatAreNegativeNotFiniteOrForbidden) {
  expect_one(check_attention({{0, LayerArray::prompt, 0, 4, -0.5F}}), "row 1: key 0 has weight -0.5");
  expect_one(check_attention({{0, LayerArray::prompt, 0, 4, kInfinity}}),
             "row 1: key 0 has weight +infinity");
  expect_one(check_attention({{0, LayerArray::prompt, 0, 3, 1e-20F}}),
             "row 0: key 3 has weight 1e-20, expected 0");
}

TEST(Check, AppliesTheMaskOfEachLayer) {
  SequenceInfo info = small_attention();
  info.masks[1].window = 4;
  // Layer 1, position 4 sees keys 1..4 and position 5 sees 2..5; the uniform rows give older keys something.
  const CheckReport report = check_attention({}, FloatType::float32, info);
  EXPECT_EQ(report.total, 2 * 4);
  EXPECT_NE(report.violations.at(0).find("layer 1, query head 0, row 4: key 0 has weight 0.2, expected 0"),
            std::string::npos);
  // Position 1 sees position 2 when prompt tokens of one image see each other.
  const std::vector<Spoil> see_each_other{{0, LayerArray::prompt, 0, 5, 0.25F},
                                          {0, LayerArray::prompt, 0, 6, 0.25F}};
  EXPECT_EQ(check_attention(see_each_other).total, 1);
  info = small_attention();
  info.masks[0].bidirectional = MaskRule::Bidirectional::image;
  EXPECT_EQ(check_attention(see_each_other, FloatType::float32, info).total, 0);
}

TEST(Check, TakesTheToleranceOfTheStoredType) {
  // The single weight of position 0, off by 3/2048: representable in half, not in bfloat16's 8 bits.
  const Spoil off{0, LayerArray::prompt, 0, 0, 1 - 3.0F / 2048};
  EXPECT_EQ(check_attention({off}, FloatType::float32).total, 1);
  EXPECT_EQ(check_attention({off}, FloatType::float16).total, 0);
  const Spoil further{0, LayerArray::prompt, 0, 0, 1 - 1.0F / 128};
  EXPECT_EQ(check_attention({further}, FloatType::float16).total, 1);
  EXPECT_EQ(check_attention({further}, FloatType::bfloat16).total, 0);
  const Spoil too_far{0, LayerArray::prompt, 0, 0, 1 - 1.0F / 64};
  EXPECT_EQ(check_attention({too_far}, FloatType::bfloat16).total, 1);
}

TEST(Check, CountsARowOfZerosAsMasked) {
  const CheckReport report = check_attention({{0, LayerArray::prompt, 0, 0, 0}});
  EXPECT_EQ(report.total, 0);
  EXPECT_EQ(report.masked_rows, 1);
}

TEST(Check, CountsAllViolationsAndNamesTheFirst) {
  std::vector<Spoil> spoils;
  for (Index head = 0; head < 4; ++head) {
    spoils.push_back({0, LayerArray::prompt, head, 0, 0.5F});
    spoils.push_back({1, LayerArray::prompt, head, 0, 0.5F});
  }
  const CheckReport report = check_attention(spoils, FloatType::float32, small_attention(), 3);
  EXPECT_EQ(report.total, 8);
  EXPECT_EQ(report.violations.size(), 3u);
}

TEST(Check, FindsValuesThatAreNotFiniteBesideAttention) {
  SequenceInfo info = small_attention();
  info.has_values = true;
  expect_one(check_attention({{1, LayerArray::values, 1, 4 * 5 + 2, -kInfinity}}, FloatType::float32, info),
             "layer 1, KV head 1, position 5: v[2] is -infinity");
}

TEST(Check, FindsWhatIsNotFiniteInEachArrayOfAQkvPayload) {
  struct Case {
    LayerArray array;
    const char* words;
  };
  for (const Case& c : {Case{LayerArray::queries, "query head 1, position 4: q[3] is NaN"},
                        Case{LayerArray::keys, "KV head 1, position 4: k[3] is NaN"},
                        Case{LayerArray::values, "KV head 1, position 4: v[3] is NaN"}}) {
    const Scratch scratch;
    const SequenceInfo info = small_qkv();
    TraceWriter writer(scratch / "trace.h5", {});
    writer.begin_sequence(info, {}, FloatType::bfloat16);
    for (Index layer = 0; layer < info.layers; ++layer) {
      for (const LayerArray array : arrays_of(info)) {
        for (Index head = 0; head < heads_of(info, array); ++head) {
          std::vector<float> values = exact_head(info, array, layer, head);
          if (array == c.array && layer == 1 && head == 1) {
            values[4 * 4 + 3] = kNan;
          }
          writer.write_head(layer, array, head, values);
        }
      }
    }
    writer.finish();
    TraceFile trace(scratch / "trace.h5");
    expect_one(check_trace(trace), c.words);
  }
}

TEST(Check, CountsASequenceThatCannotBeOpenedAndGoesOn) {
  const Scratch scratch;
  TraceWriter writer(scratch / "trace.h5", {});
  write_exact(writer, small_qkv("one"), FloatType::float32);
  write_exact(writer, small_qkv("two"), FloatType::float32);
  writer.finish();
  RawFile(scratch / "trace.h5").remove(kLayer + "/k");
  TraceFile trace(scratch / "trace.h5");
  expect_one(check_trace(trace), "/sequences/000000/layers/000000/k: missing");
}

TEST(RowViolation, FollowsDisjointRanges) {
  const std::vector<Range> visible{{1, 2}, {3, 5}};
  EXPECT_EQ(row_violation(std::vector<float>{0, 0.5F, 0, 0.25F, 0.25F, 0}, visible, 1e-4), std::nullopt);
  for (const std::size_t forbidden : {0u, 2u, 5u}) {
    std::vector<float> row{0, 0.5F, 0, 0.25F, 0.25F, 0};
    row[forbidden] = 1e-6F;
    EXPECT_EQ(
        row_violation(row, visible, 1e-4),
        "key " + std::to_string(forbidden) + " has weight 1e-06, expected 0 because the mask forbids it");
  }
}

TEST(OptionalData, NamesFramesAndPatchesThatBelongToNoPicture) {
  const auto violations = [](const SequenceDetails& details) {
    const Scratch scratch;
    write_small(scratch / "trace.h5", small_qkv(), FloatType::float32, details);  // the picture is at 1 and 2
    return TraceFile(scratch / "trace.h5").optional_violations(0);
  };
  SequenceDetails details;
  EXPECT_TRUE(violations(details).empty());
  details.frame = {-1, 0, 1, -1, -1, -1};
  details.patch = {{-1, -1}, {0, 0}, {0, 1}, {-1, -1}, {-1, -1}, {-1, -1}};
  EXPECT_TRUE(violations(details).empty());
  details.frame[4] = 2;  // a text token
  details.patch[1] = {0, -7};
  const std::vector<std::string> found = violations(details);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_NE(found[0].find("/frame[4]: found 2"), std::string::npos) << found[0];
  EXPECT_NE(found[1].find("/patch[1]: found 0 -7"), std::string::npos) << found[1];
}

TEST(CheckFile, NamesWhatIsWrongWithOptionalData) {
  SequenceDetails details;
  details.frame = {-1, 0, 1, -1, 2, -1};  // the picture is at 1 and 2
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv(), FloatType::float32, details);
  TraceFile trace(scratch / "trace.h5");
  expect_one(check_file(trace), "/frame[4]: found 2");
  EXPECT_EQ(check_file(trace, 0).total, 1);
  EXPECT_TRUE(check_file(trace, 0).violations.empty());
}

TEST(CheckFile, StopsWhereItIsToldTo) {
  struct Stop {};
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv(), FloatType::float32);
  TraceFile trace(scratch / "trace.h5");
  Index layers = 0;
  EXPECT_TRUE(check_file(trace, 10, [&] { ++layers; }).violations.empty());
  EXPECT_EQ(layers, small_qkv().layers);
  EXPECT_THROW(static_cast<void>(check_file(trace, 10, [] { throw Stop(); })), Stop);
}

}  // namespace
}  // namespace hae::traces::test
