#include "sim/cli/terminal.hpp"

#include <gmock/gmock.h>

#include "sim/cli/run_table.hpp"

namespace hae::cli {
namespace {

using ::testing::ElementsAre;

TEST(TextWidth, CountsTheColumnsOfATerminal) {
  EXPECT_EQ(text_width(""), 0u);
  EXPECT_EQ(text_width("0.1 ± 0.2"), 9u);
  EXPECT_EQ(text_width("猫と犬"), 6u);   // wide characters
  EXPECT_EQ(text_width("😀"), 2u);        // an emoji
  EXPECT_EQ(text_width("e\u0301"), 1u);  // with a combining accent
  EXPECT_EQ(text_width("a\xff\xc3"
                       "b"),
            4u);  // no UTF-8: a byte, a column
}

TEST(Wrapped, BreaksAfterSpacesCommasAndSlashes) {
  EXPECT_THAT(wrapped("", 10), ElementsAre(""));
  EXPECT_THAT(wrapped("one two three", 7), ElementsAre("one two", "three"));
  EXPECT_THAT(wrapped("hae:r=0.007,alpha=0.008,budget=64", 14),
              ElementsAre("hae:r=0.007,", "alpha=0.008,", "budget=64"));
  EXPECT_THAT(wrapped("abcdefgh", 3), ElementsAre("abc", "def", "gh"));
  EXPECT_THAT(wrapped("猫と犬", 5), ElementsAre("猫と", "犬"));  // never half a character
  EXPECT_THAT(wrapped("猫", 1), ElementsAre("猫"));
}

TEST(Table, AlignsWideNames) {
  EXPECT_EQ(format_table({{"policy", "mean", "&peak"}, {"猫", "1.0", "2"}, {"abc", "10.0 ± 1.0", "30"}}),
            "policy        mean  peak\n"
            "猫             1.0     2\n"
            "abc     10.0 ± 1.0    30\n");
}

TEST(Table, DoesNotShowASmallNumberAsNone) {
  const auto mean = [](double x) { return Json{{"mean", x}, {"interval95", nullptr}}; };
  Json policy{{"policy", "p"}, {"unequal", false}};
  for (const char* figure : {"tokens.mean", "tokens.peak", "bytes.mean", "decode.missed_mass.mean",
                             "optimal_mean", "decode.missed_mass.p95", "decode.missed_mass.max",
                             "decode.output_error_relative.mean", "evictions", "events"}) {
    policy[figure] = mean(0);
  }
  policy["decode.missed_pull.mean"] = mean(2e-6);
  EXPECT_THAT(summary_table(Json::array({policy})), ::testing::HasSubstr("2.0e-06"));
}

}  // namespace
}  // namespace hae::cli
