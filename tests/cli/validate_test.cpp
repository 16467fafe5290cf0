#include <gtest/gtest.h>

#include "tests/cli/cli.hpp"

namespace hae::testing {
namespace {

using ::testing::HasSubstr;

class ValidateCommand : public Cli {
 protected:
  Outcome validate(const std::string& arguments, const std::string& fault = "") {
    return hae("validate --kernels '" HAE_GALLERY_LIBRARY "' " + arguments, "HAE_GALLERY=" + fault);
  }
};

TEST_F(ValidateCommand, PassesRightKernelsAndSaysHowManyCases) {
  const Outcome right = validate("--operation prune --junit hae.xml");
  EXPECT_EQ(right.code, 0) << right.err;
  EXPECT_THAT(right.out, HasSubstr("prune: 52 of 52 cases passed"));
  EXPECT_THAT(read(folder_ / "hae.xml"), HasSubstr("failures=\"0\""));
}

TEST_F(ValidateCommand, ShowsSavesAndRepeatsTheSmallestCounterexample) {
  const Outcome wrong = validate("--operation prune --save failures --junit hae.xml", "alpha-ignored");
  expect_one_line(wrong, 1);
  EXPECT_THAT(wrong.out, HasSubstr("fault: alpha is ignored"));
  EXPECT_THAT(wrong.out, HasSubstr("saved: failures/prune.h5"));
  EXPECT_THAT(read(folder_ / "hae.xml"), HasSubstr("<failure message=\"evicted["));
  const Outcome again = validate("--repro failures/prune.h5", "alpha-ignored");
  expect_one_line(again, 1);
  EXPECT_THAT(again.out, HasSubstr("value: evicted["));
  EXPECT_EQ(validate("--repro failures/prune.h5").code, 0);
}

TEST_F(ValidateCommand, ReplaysOneCaseOfItsList) {
  const Outcome list = hae("validate --list --operation attend");
  EXPECT_EQ(list.code, 0);
  const std::string name = list.out.substr(0, list.out.find('\n'));
  EXPECT_THAT(validate("--case " + name).out, HasSubstr("attend: 1 of 1 cases passed"));
}

TEST_F(ValidateCommand, SaysWhatIsWrongWithItsArguments) {
  expect_one_line(hae("validate"), 2);
  expect_one_line(validate("--operation attention"), 2);
  expect_one_line(validate("--case attend/none"), 2);
  expect_one_line(hae("validate --kernels missing.so"), 3);
  make_trace("trace.h5");
  const Outcome no_problem = validate("--repro trace.h5");
  expect_one_line(no_problem, 3);
  EXPECT_THAT(no_problem.err, HasSubstr("not a problem file"));
}

TEST_F(ValidateCommand, NamesTheCaseInWhichALibraryCrashes) {
  const Outcome crashed = validate("--operation prune", "crashes");
  expect_one_line(crashed, 1);
  EXPECT_THAT(crashed.err, HasSubstr("crashed in case prune/"));
}

TEST_F(ValidateCommand, NamesTheCaseInWhichALibraryEndsTheProgram) {
  const Outcome ended = validate("--operation prune", "exits");
  expect_one_line(ended, 1);
  EXPECT_THAT(ended.err, HasSubstr("called exit() in case prune/"));
}

TEST_F(ValidateCommand, RefusesWordsThatDoNotGoTogether) {
  expect_one_line(validate("--list --operation bogus"), 2);
  const Outcome other = validate("--operation compact --case prune/all-go/float64/tokens-65/scopes-1");
  expect_one_line(other, 2);
  EXPECT_THAT(other.err, HasSubstr("is of operation prune"));
}

}  // namespace
}  // namespace hae::testing
