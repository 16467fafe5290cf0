#pragma once

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <string>

#include "sim/view.hpp"

namespace hae::testing {

/// Checks a property whose cases can be dull, and fails if fewer than `share` of them were interesting. The
/// property returns whether its case was.
template <typename Property>
void check_interesting(const std::string& description, double share, const Property& property) {
  Index cases = 0;
  Index interesting = 0;
  EXPECT_TRUE(rc::check(description, [&] {
    const bool is_interesting = property();
    ++cases;
    interesting += is_interesting ? 1 : 0;
  }));
  EXPECT_GE(static_cast<double>(interesting), share * static_cast<double>(cases))
      << "of " << cases << " cases";
}

}  // namespace hae::testing
