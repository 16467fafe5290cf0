#include "sim/log.hpp"

#include <gtest/gtest.h>

namespace hae {
namespace {

TEST(Log, PrintsOneJsonLineAnEviction) {
  EvictionLog log;
  log.entries = {{0, 1, kLayerLane, 7, true, 0.1, std::nullopt, std::nullopt},
                 {3, 0, 2, 5, false, std::nullopt, 2, Merge{9, 0.75, 0.25, 2.0}}};
  EXPECT_EQ(
      to_json_lines(log),
      "{\"step\":0,\"layer\":1,\"lane\":-1,\"token\":7,\"within\":true,\"score\":0.1,\"pending_since\":null,"
      "\"into\":null}\n"
      "{\"step\":3,\"layer\":0,\"lane\":2,\"token\":5,\"within\":false,\"score\":null,\"pending_since\":2,"
      "\"into\":9,\"weights\":[0.75,0.25],\"size\":2}\n");
  EXPECT_EQ(to_json_lines(log, 4).substr(0, 24), "{\"sequence\":4,\"step\":0,\"");
}

TEST(Log, NumbersReadBackEqual) {
  // 1/3 needs 16 digits; the shortest text that reads back equal is printed, not a fixed number of digits.
  EvictionLog log;
  log.entries = {{0, 0, kLayerLane, 0, false, 1.0 / 3.0, std::nullopt, std::nullopt}};
  EXPECT_NE(to_json_lines(log).find("\"score\":0.3333333333333333,"), std::string::npos);
}

}  // namespace
}  // namespace hae
