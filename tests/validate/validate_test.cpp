#include "validate/validate.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif
#include <set>

#include "sim/errors.hpp"
#include "tests/validate/gallery.hpp"
#include "tests/validate/gallery_device.hpp"
#include "traces/float16.hpp"

namespace hae::validate {
namespace {

using ::testing::HasSubstr;

// ---- numbers

/// traces' conversions are code of their own, written and tested apart.
TEST(Number, AgreesWithTheTraceFormatsConversions) {
  Draw draw("floats", 1);
  for (int i = 0; i < 200000; ++i) {
    const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(draw.bits()));
    if (std::isnan(value)) {
      continue;
    }
    EXPECT_EQ(rounded(Type::float16, value), traces::float_from_half(traces::half_from_float(value)))
        << value;
    EXPECT_EQ(rounded(Type::bfloat16, value),
              traces::float_from_bfloat16(traces::bfloat16_from_float(value)));
    EXPECT_EQ(rounded(Type::float32, value), value);
  }
}

TEST(Number, StoresAndLoadsEverySixteenBitCode) {
  for (const Type type : {Type::float16, Type::bfloat16}) {
    for (unsigned code = 0; code < 0x10000; ++code) {
      const auto half = static_cast<std::uint16_t>(code);
      std::byte bytes[2];
      std::memcpy(bytes, &half, 2);
      const double value = load(type, bytes);
      const double expected =
          type == Type::float16 ? traces::float_from_half(half) : traces::float_from_bfloat16(half);
      if (std::isnan(expected)) {
        EXPECT_TRUE(std::isnan(value));
        continue;
      }
      EXPECT_EQ(value, expected);
      std::byte again[2];
      store(type, value, again);
      EXPECT_EQ(std::memcmp(bytes, again, 2), 0) << code;
    }
  }
}

TEST(Arithmetic, GammaIsHighamsAndEndsWhereThereIsNoBound) {
  const Arithmetic half(format_of(Type::float16));
  EXPECT_NEAR(half.gamma(8), 8 * 0x1p-11 / (1 - 8 * 0x1p-11), 1e-12);
  EXPECT_EQ(half.gamma(2048), std::numeric_limits<double>::infinity());  // 2048 roundings of 2^-11
}

// ---- problems and cases

Problem selection(std::vector<double> scores, Index most) {
  Problem problem;
  problem.operation = "select_lowest";
  problem.extents = {{Axis::lanes, 1}, {Axis::slots, std::ssize(scores)}, {Axis::most, most}};
  problem.numbers["ordered"] = 1;
  problem.inputs = {tensor("scores", Type::float32, {Axis::lanes, Axis::slots}, std::move(scores)),
                    tensor("counts", Type::int64, {Axis::lanes}, {double(most)}, Axis::most)};
  problem.outputs = {tensor("chosen", Type::int64, {Axis::lanes, Axis::most})};
  return problem;
}

TEST(Cases, HaveNamesOfTheirOwnAndAreReplayable) {
  for (const Operation* operation : operations()) {
    const std::vector<std::string> names = case_names(*operation);
    EXPECT_EQ(std::set(names.begin(), names.end()).size(), names.size()) << operation->name;
    const Problem once = problem_of(*operation, names[1], 0);
    const Problem again = problem_of(*operation, names[1], 0);
    const Problem other = problem_of(*operation, names[1], 1);
    for (std::size_t i = 0; i < once.inputs.size(); ++i) {
      EXPECT_EQ(once.inputs[i].values, again.inputs[i].values);
    }
    EXPECT_EQ(once.extents, other.extents);
    EXPECT_NO_THROW(check(once));
  }
}

/// A bound that lets anything pass would be no bound: 1000 where nothing is beyond 200.
TEST(Cases, NoBoundIsVacuous) {
  const Arithmetic arithmetic(format_of(Type::float32));
  for (const char* name : {"add_scores", "attend"}) {
    const Operation& operation = operation_of(name);
    for (const std::string& one : case_names(operation)) {
      const Problem problem = problem_of(operation, one, 0);
      Results results;
      std::size_t expected = 0;
      for (const Tensor& output : problem.outputs) {
        const std::vector<bool> defined = operation.defined(problem, output);
        expected += std::ranges::count(defined, true) > 0;
        results[output.name].assign(defined.size(), 1e30);
      }
      EXPECT_EQ(operation.judge(problem, results, arithmetic).size(), expected) << one;
    }
  }
}

TEST(Problem, LosesASliceOfEveryArrayAndOfWhatCountsIt) {
  Problem problem;
  problem.operation = "select_lowest";
  problem.extents = {{Axis::lanes, 2}, {Axis::slots, 4}, {Axis::most, 1}};
  problem.inputs = {tensor("scores", Type::float32, {Axis::lanes, Axis::slots}, {0, 1, 2, 3, 4, 5, 6, 7}),
                    tensor("lengths", Type::int64, {Axis::lanes}, {4, 1}, Axis::slots)};
  const Problem left = without(problem, Axis::slots, 0, 3);
  EXPECT_EQ(left.extent(Axis::slots), 1);
  EXPECT_THAT(left.values("scores"), ::testing::ElementsAre(3, 7));
  EXPECT_THAT(left.values("lengths"), ::testing::ElementsAre(1, 0));  // 4 - 3 slots; 1 - the one it had
}

/// Each operation's cases are of its form; a problem that lacks an argument's name, axes or values is not.
TEST(Problem, FromElsewhereIsHeldToItsOperationsForm) {
  for (const Operation* operation : operations()) {
    const std::vector<std::string> names = case_names(*operation);
    EXPECT_NO_THROW(check_form(*operation, problem_of(*operation, names[names.size() / 3], 0)))
        << operation->name;
  }
  const Problem sound = selection({1, 2, 3}, 2);
  Problem renamed = sound;
  renamed.inputs.front().name = "other";
  EXPECT_THROW(check_form(kSelectLowest, renamed), ConfigError);
  Problem turned = sound;
  std::swap(turned.inputs.front().axes.front(), turned.inputs.front().axes.back());
  EXPECT_THROW(check_form(kSelectLowest, turned), ConfigError);
  Problem without_output = sound;
  without_output.outputs.clear();
  EXPECT_THROW(check_form(kSelectLowest, without_output), ConfigError);
  Problem longer = sound;
  longer.inputs.front().values.emplace_back(0);
  EXPECT_THROW(check(longer), ConfigError);
  Problem counted = sound;
  counted.input("counts")->values = {3};  // of at most 2
  EXPECT_THROW(check(counted), ConfigError);
}

TEST(Placement, KeepsElementsApartAndFindsThemAgain) {
  const Memory host(hae_memory{});
  for (const Layout::Order order :
       {Layout::Order::dense, Layout::Order::padded, Layout::Order::token_major}) {
    for (const Index page_size : {0, 1, 3, 16}) {
      Problem problem;
      problem.extents = {{Axis::items, 2}, {Axis::lanes, 3}, {Axis::slots, 5}, {Axis::head_dim, 2}};
      Tensor keys = tensor("keys", Type::float32, {Axis::items, Axis::lanes, Axis::slots, Axis::head_dim});
      for (Index i = 0; i < 60; ++i) {
        keys.values.push_back(double(i));
      }
      problem.inputs = {keys};
      problem.layout = {.order = order, .misaligned = true, .page_size = page_size};
      Placement placed(problem, host);
      placed.fill(0xFF);
      const hae_array array = placed.array("keys");
      const hae_array table = placed.array("block_table");
      for (Index i = 0; i < 60; ++i) {
        Index first = i / 30;
        Index slot = i / 2 % 5;
        if (page_size > 0) {
          const Index block = slot / page_size;
          first = static_cast<const std::int32_t*>(
              table.data)[first * table.strides[0] + block * table.strides[1]];
          slot %= page_size;
        }
        const Index offset =
            first * array.strides[0] + i / 10 % 3 * array.strides[1] + slot * array.strides[2] + i % 2;
        EXPECT_EQ(static_cast<const float*>(array.data)[offset], float(i));
      }
      static_cast<float*>(array.data)[-1] = 0;
      placed.fetch();
      EXPECT_THAT(placed.damage().at("keys"), HasSubstr("4 bytes before"));
    }
  }
}

// ---- verdicts

std::string verdict(const Problem& problem, std::vector<double> chosen) {
  const std::vector<Finding> findings =
      kSelectLowest.judge(problem, {{"chosen", std::move(chosen)}}, Arithmetic(format_of(Type::float32)));
  return findings.empty() ? "right" : name_of(findings.front().kind);
}

/// CASES C03 b and C04: (0.1, NaN, 0.3, -NaN, 0.2): the NaNs first, the older before; then the lowest.
TEST(Verdict, OfASelectionTellsSetFromOrder) {
  const double nan = std::nan("");
  const Problem problem = selection({0.0625, nan, 0.25, -nan, 0.125}, 3);
  EXPECT_EQ(verdict(problem, {1, 3, 0}), "right");
  EXPECT_EQ(verdict(problem, {3, 1, 0}), "order");
  EXPECT_EQ(verdict(problem, {0, 4, 2}), "choice");
  EXPECT_EQ(verdict(problem, {1, 1, 0}), "choice");
  EXPECT_EQ(verdict(problem, {1, 3, 2147483647}), "choice");
  EXPECT_EQ(verdict(problem, {1, 3, -1}), "choice");
  EXPECT_EQ(verdict(selection({0, -0.0, 1, 0}, 2), {0, 1}), "right");  // +0 and -0 are equal
  EXPECT_EQ(verdict(selection({0, -0.0, 1, 0}, 2), {1, 0}), "order");
}

/// Two scores of 0.1 + 0.2 and 0.3 in float32 differ by what the sum may lose: either may go. 0.25 may not.
TEST(Verdict, OfASelectionFromRowsExcusesOnlyWhatRoundingMayExchange) {
  Problem problem;
  problem.operation = "select_from_rows";
  problem.extents = {{Axis::lanes, 1}, {Axis::group, 1}, {Axis::rows, 2}, {Axis::slots, 3}, {Axis::most, 1}};
  const double a = 0.1f;
  const double b = 0.2f;
  const double c = 0.3f;
  problem.inputs = {tensor("probabilities", Type::float32,
                           {Axis::lanes, Axis::group, Axis::rows, Axis::slots}, {a, c, 0.5, b, 0, 0}),
                    tensor("counts", Type::int64, {Axis::lanes}, {1}, Axis::most)};
  problem.outputs = {tensor("chosen", Type::int64, {Axis::lanes, Axis::most})};
  ASSERT_NE(a + b, c);
  const Arithmetic arithmetic(format_of(Type::float32));
  EXPECT_TRUE(kSelectFromRows.judge(problem, {{"chosen", {0}}}, arithmetic).empty());
  EXPECT_TRUE(kSelectFromRows.judge(problem, {{"chosen", {1}}}, arithmetic).empty());
  EXPECT_FALSE(kSelectFromRows.judge(problem, {{"chosen", {2}}}, arithmetic).empty());
}

/// CASES E07: interleaved heads; N02: a row with nothing to attend to.
TEST(Verdict, OfAttentionIsByHand) {
  Problem problem;
  problem.operation = "attend";
  problem.extents = {
      {Axis::items, 1}, {Axis::lanes, 2}, {Axis::group, 1}, {Axis::slots, 2}, {Axis::head_dim, 1}};
  problem.numbers = {{"scale", 1}, {"window", 0}};
  // Lane 0: logits 0 and ln 3 rounded, values 0 and 4: a = 1/4, 3/4, o = 3, log-sum-exp ln 4. Lane 1 is
  // empty.
  const double ln3 = rounded(Type::float32, std::log(3.0));
  problem.inputs = {
      tensor("queries", Type::float32, {Axis::items, Axis::lanes, Axis::group, Axis::head_dim}, {1, 1}),
      tensor("keys", Type::float32, {Axis::items, Axis::lanes, Axis::slots, Axis::head_dim}, {0, ln3, 0, 0}),
      tensor("values", Type::float32, {Axis::items, Axis::lanes, Axis::slots, Axis::head_dim}, {0, 4, 1, 1}),
      tensor("lengths", Type::int64, {Axis::items, Axis::lanes}, {2, 0}, Axis::slots)};
  problem.outputs = {
      tensor("probabilities", Type::float32, {Axis::items, Axis::lanes, Axis::group, Axis::slots}),
      tensor("output", Type::float32, {Axis::items, Axis::lanes, Axis::group, Axis::head_dim}),
      tensor("log_sum_exp", Type::float32, {Axis::items, Axis::lanes, Axis::group})};
  const Arithmetic arithmetic(format_of(Type::float32));
  const double infinity = std::numeric_limits<double>::infinity();
  Results results{{"probabilities", {0.25, 0.75, 7, 7}},  // beyond the length anything may stand
                  {"output", {3, 0}},
                  {"log_sum_exp", {rounded(Type::float32, std::log(4.0)), -infinity}}};
  EXPECT_TRUE(kAttend.judge(problem, results, arithmetic).empty());
  results["output"][1] = std::nan("");
  results["probabilities"][0] = 0.25001;
  const std::vector<Finding> findings = kAttend.judge(problem, results, arithmetic);
  ASSERT_EQ(findings.size(), 2u);
  EXPECT_EQ(findings[0].place, "[0, 0, 0, 0]");
  EXPECT_EQ(findings[1].place, "[0, 1, 0, 0]");
  EXPECT_EQ(findings[1].expected, 0);
}

// ---- counterexamples

TEST(Shrinking, EndsAtTwoEqualScores) {
  const std::vector<OperationReport> reports = validate(
      *gallery::table_with("ties-by-highest"), {.operations = {"select_lowest"}, .most_elements = 500});
  const Problem& smallest = reports.front().smallest->problem;
  EXPECT_EQ(smallest.extent(Axis::slots), 2);
  EXPECT_EQ(smallest.extent(Axis::most), 1);
  EXPECT_EQ(smallest.values("scores")[0], smallest.values("scores")[1]);
}

TEST(Validate, RefusesATableItCannotUse) {
  hae_kernels table = *gallery::table_with("");
  table.abi = 99;
  EXPECT_THAT([&] { check(table); },
              ::testing::ThrowsMessage<ConfigError>(HasSubstr("abi is 99, expected 1")));
  table.abi = HAE_KERNELS_ABI;
  table.accumulation = HAE_FLOAT16;
  EXPECT_THAT([&] { check(table); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr("have no bound")));
  table.accumulation = HAE_FLOAT32;
  table.memory.release = [](void*) {};
  EXPECT_THAT([&] { check(table); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr("give all, or none")));
}

/// Kernels that keep arrays elsewhere, and work that waits in streams.
TEST(Device, RightKernelsPass) {
  const OperationReport report =
      validate(*gallery::device_table_with(""), {.operations = {"prune"}, .most_elements = 500}).front();
  EXPECT_TRUE(report.right());
  EXPECT_GT(report.passed, 10);
  EXPECT_EQ(report.left_out, 1);  // arrays beyond 2^31 elements do not fit
  EXPECT_EQ(gallery::device_allocations(), 0);
}

TEST(Device, FaultsOfStreamsAreCaughtAndNamed) {
  const std::pair<const char*, const char*> kFaults[] = {
      {"default-stream", "not in the stream of the call"},
      {"one-scratch", "calls in two streams disturb each other"},
  };
  for (const auto& [fault, said] : kFaults) {
    const OperationReport report =
        validate(*gallery::device_table_with(fault), {.operations = {"prune"}, .most_elements = 500}).front();
    EXPECT_EQ(report.passed, 3) << fault;  // cases without a token
    EXPECT_THAT(report.fault, HasSubstr(said));
  }
}

/// A library that is linked for fast math makes the whole thread flush subnormal numbers to zero.
TEST(Validate, JudgesInItsOwnArithmetic) {
#ifdef __SSE2__
  const std::string name = "select_lowest/special/subnormal/float32/slots-40/most-11";
  const Problem usual = problem_of(kSelectLowest, name, 0);
  const unsigned before = _mm_getcsr();
  constexpr unsigned kFlush = 0x8040;
  _mm_setcsr(before | kFlush);
  const Problem flushing = problem_of(kSelectLowest, name, 0);
  const OperationReport report = validate(*gallery::table_with(""), {.one_case = name}).front();
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(flushing.values("scores"), usual.values("scores"));
  EXPECT_EQ(report.failed, 1);        // the kernel computes as the thread did, and loses what is subnormal
  EXPECT_EQ(after & kFlush, kFlush);  // the caller's is given back
#else
  GTEST_SKIP() << "written for x86";
#endif
}

TEST(Device, ACopyThatFailsIsTold) {
  hae_kernels table = *gallery::device_table_with("");
  table.memory.copy_in = [](void*, const void*, std::int64_t, void*) -> std::int32_t { return 3; };
  EXPECT_THROW((void)validate(table, {.operations = {"prune"}}), DeviceError);
}

TEST(Validate, AnOperationThatServesNoCaseIsNotRight) {
  hae_kernels table = *gallery::table_with("");
  table.prune = [](const hae_prune_arguments*, const hae_context*) -> std::int32_t {
    return HAE_UNSUPPORTED;
  };
  table.compact = nullptr;
  const std::vector<OperationReport> reports = validate(table, {.operations = {"prune", "compact"}});
  EXPECT_FALSE(reports[0].right());
  EXPECT_EQ(reports[0].passed, 0);
  EXPECT_FALSE(reports[1].offered);
  EXPECT_TRUE(reports[1].right());
}

}  // namespace
}  // namespace hae::validate
