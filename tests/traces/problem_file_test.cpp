#include "traces/problem_file.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <limits>

#include "sim/errors.hpp"

namespace hae::traces {
namespace {

namespace fs = std::filesystem;

class ProblemFile : public ::testing::Test {
 protected:
  ~ProblemFile() override { fs::remove(path_); }
  fs::path path_ = fs::temp_directory_path() / ("hae-problem-" + std::to_string(::getpid()) + ".h5");
};

TEST_F(ProblemFile, KeepsEveryNumberExactly) {
  const double infinity = std::numeric_limits<double>::infinity();
  const StoredProblem problem{"attend",
                              "attend/plain",
                              {{"items", 1}, {"slots", 3}},
                              {{"page_size", 16}},
                              {},
                              {{"keys", "float32", {"items", "slots"}, "none", {0x1p-149, -0.0, -infinity}}},
                              {{"output", "float32", {"items"}, "none", {}}}};
  write_problem(path_, problem);
  const StoredProblem read = read_problem(path_);
  EXPECT_EQ(read, problem);
  EXPECT_TRUE(std::signbit(read.inputs[0].values[1]));
}

TEST_F(ProblemFile, RefusesWhatIsNoneWithOneSentence) {
  std::ofstream(path_) << "no file of the kind";
  EXPECT_THROW((void)read_problem(path_), TraceError);
}

}  // namespace
}  // namespace hae::traces
