#pragma once

#include <string>
#include <vector>

#include "sim/cli/result_json.hpp"

namespace hae::cli {

/// Of a table; the first is its heading.
using Rows = std::vector<std::vector<std::string>>;

/// Left-aligned first column, right-aligned others, two spaces between. On a terminal that is narrower, in
/// several parts one below the other, each with the first column, which is broken where it is long. A heading
/// that begins with & keeps its column in one part with the one before; the & is not shown.
std::string format_table(Rows rows);

/// The mean of a group_interval in a fmt format, `-` for null; with an exponent where it would read 0 and is
/// not.
std::string mean_text(const Json& figure, const char* format);

/// The comparison that a terminal shows: one line a policy, means over groups, 95 % intervals where there are
/// two groups or more, and what does not compare fairly.
std::string summary_table(const Json& summary);

/// What a terminal shows of how much policies lose beside each other: missed pull, or missed mass where it is
/// not known. Empty for one policy, and where nothing is lost.
std::string bars(const Json& summary);

/// One line a policy: its evictions by kind of token, and the share of each kind that it keeps; means over
/// groups.
std::string kinds_table(const Json& summary);

/// The means of an overlap_json: one line and one column a policy, columns by the numbers of the lines.
std::string overlap_table(const Json& overlap);

/// Warnings of all runs, equal ones of a policy once with the number of sequences they concern; what is equal
/// for all policies, as what a trace holds is, once.
std::string warning_lines(const Json& runs);

}  // namespace hae::cli
