#include "tests/validate/gallery.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "validate/validate.hpp"

namespace hae::validate {
namespace {

std::string text_of(const OperationReport& report) {
  std::string text = report.operation;
  for (const Outcome& outcome : report.outcomes) {
    for (const Finding& finding : outcome.findings) {
      text += "\n" + outcome.name + ": " + name_of(finding.kind) + " " + finding.text;
    }
  }
  return text;
}

class RightKernels : public ::testing::TestWithParam<const Operation*> {};

TEST_P(RightKernels, PassEveryCase) {
  for (const OperationReport& report :
       validate(*gallery::table_with(""), {.operations = {GetParam()->name}})) {
    EXPECT_EQ(report.failed, 0) << text_of(report);
    EXPECT_EQ(report.unsupported, 0);
    EXPECT_GT(report.passed, 30);
  }
}

INSTANTIATE_TEST_SUITE_P(Gallery, RightKernels, ::testing::ValuesIn(operations()),
                         [](const auto& one) { return std::string(one.param->name); });

/// Every wrong library is caught, by a smaller case than it was found with, and its fault is named.
TEST(Gallery, EveryFaultIsCaughtAndNamed) {
  int caught = 0;
  int named = 0;
  for (const gallery::Mutant& mutant : gallery::mutants()) {
    SCOPED_TRACE(std::string(mutant.operation) + " with " + mutant.name);
    // The small cases catch all but what only size shows.
    std::vector<OperationReport> reports = validate(
        *gallery::table_with(mutant.name), {.operations = {mutant.operation}, .most_elements = 6000});
    if (reports.front().failed == 0) {
      reports = validate(*gallery::table_with(mutant.name), {.operations = {mutant.operation}});
    }
    const OperationReport& report = reports.front();
    ASSERT_EQ(reports.size(), 1u);
    EXPECT_GT(report.failed, 0);
    caught += report.failed > 0;
    EXPECT_THAT(report.fault, ::testing::HasSubstr(mutant.said));
    named += report.fault.find(mutant.said) != std::string::npos;
    if (report.smallest) {
      EXPECT_EQ(report.smallest->status, Outcome::Status::failed);
      std::printf("%s/%s: %lld of %zu cases; %s\n    %s\n    %s\n", mutant.operation, mutant.name,
                  static_cast<long long>(report.failed), report.outcomes.size(), report.fault.c_str(),
                  describe(report.smallest->problem).c_str(), report.smallest->findings.front().text.c_str());
    }
  }
  const auto all = static_cast<int>(gallery::mutants().size());
  std::printf("%d of %d wrong libraries caught, %d named\n", caught, all, named);
  EXPECT_GE(all, 30);
}

}  // namespace
}  // namespace hae::validate
