#pragma once

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <ostream>
#include <string>

#include "tests/support/memory_trace.hpp"

namespace hae::testing {

/// What a generated attention row looks like.
enum class RowKind { spread, one_hot, uniform, ties, with_zeros, subnormal, masked };

/// Bounds of generated traces.
struct TraceBounds {
  Index least_tokens = 1;
  Index most_tokens = 40;
  Index most_layers = 3;
  bool allow_masked = true;
  bool allow_decode_less = true;
  bool prunable = false;  ///< the prompt ends in text and has a picture before it
  bool dyadic = false;  ///< weights are multiples of 1/64 that sum to 1 exactly, so sums over heads are exact
};

/// An attention trace: causal rows of every RowKind, grouped-query heads, pictures anywhere, V. Shrinks
/// toward fewer tokens, layers and heads, then simpler rows.
rc::Gen<MemoryTrace> attention_traces(const TraceBounds& bounds = {});

/// A qkv trace of unit-scale numbers with a few outliers, grouped-query heads, pictures, windows.
rc::Gen<MemoryTrace> qkv_traces(const TraceBounds& bounds = {});

/// A spec that is possible for a sequence: any policy of the table, any option.
rc::Gen<std::string> policy_specs(const SequenceInfo& info);

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

/// The shape and, where it is small, the rows: what a failing property prints.
std::ostream& operator<<(std::ostream& out, const MemoryTrace& trace);

}  // namespace hae::testing
