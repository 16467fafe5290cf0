#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sim/trace.hpp"
#include "traces/trace_file.hpp"

namespace hae::traces {

/// What a full check of a trace found.
struct CheckReport {
  std::vector<std::string> violations;  ///< the first ones, each a full sentence that names the place
  Index total = 0;                      ///< all of them
  Index rows = 0;                       ///< attention rows read
  Index masked_rows = 0;                ///< of those, rows of zeros: legal, they add nothing
};

/// Reads a whole trace and checks what opening does not: that every number of a qkv payload is finite; that
/// every attention row is finite, not negative, zero where the mask forbids, and sums to 1 within the
/// tolerance of its stored type, or is all zero. Sums are in double, ascending by position. Memory is bounded
/// by one layer's K and V and a block of rows.
///
/// most_messages  how many violations are put into words
/// keep_going     called before each layer; it may throw to stop
/// throws         nothing for a bad sequence: that it cannot be opened is one violation
[[nodiscard]] CheckReport check_trace(TraceSource& source, Index most_messages = 10,
                                      const std::function<void()>& keep_going = {});

/// The same for a file, and its optional datasets (TraceFile::optional_violations) when every sequence opens.
[[nodiscard]] CheckReport check_file(TraceFile& file, Index most_messages = 10,
                                     const std::function<void()>& keep_going = {});

/// What is wrong with one attention row, or nothing.
///
/// row        [keys] probabilities
/// visible    the keys its mask allows, ascending and disjoint
/// tolerance  how far from 1 the sum may be
[[nodiscard]] std::optional<std::string> row_violation(std::span<const float> row,
                                                       std::span<const Range> visible, double tolerance);

/// Whether a row is all zero: masked.
[[nodiscard]] bool is_masked_row(std::span<const float> row);

/// The index of the first NaN or infinity.
[[nodiscard]] std::optional<Index> first_not_finite(std::span<const float> values);

}  // namespace hae::traces
