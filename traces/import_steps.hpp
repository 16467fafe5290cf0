#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sim/trace.hpp"
#include "traces/sequence_arguments.hpp"
#include "traces/trace_writer.hpp"

// Private to this folder: what importers have in common.

namespace hae::traces {

/// Throws TraceError when there are more layers, heads, dimensions or tokens than a trace can hold.
void check_limits(const SequenceInfo& info, const std::string& where);

/// 1/sqrt(head_dim) in double; 1 where there is no head_dim.
[[nodiscard]] double default_scale(const SequenceInfo& info);

/// 0, 1, ... P - 1: an importer has every prompt row.
[[nodiscard]] std::vector<Index> every_prompt_row(Index prompt);

/// Fills in what follows from the arguments: name, group, prompt, pictures. `info.tokens` must be known.
///
/// own_name  of what is imported
/// throws    ConfigError  a prompt or picture that is not within the tokens, pictures that overlap
void apply(const SequenceArguments& arguments, const std::string& own_name, SequenceInfo& info);

/// Writes one head of queries, keys or values whose numbers must be finite.
///
/// values  [T, head_dim]
/// place   what a message says before the number's indices: `FILE:/k[0, 1, `
void write_finite_head(TraceWriter& writer, const SequenceInfo& info, Index layer, LayerArray array,
                       Index head, std::span<const float> values, const std::string& place);

/// Where the rows of one head's square matrix of attention come from, and how messages speak of them.
struct SquareAttention {
  std::function<std::span<const float>()> next_row;  ///< rows 0, 1, ... T - 1 in turn, each [T]
  std::string place;                                 ///< before a row's number: `FILE:/attention[0, 1, `
  std::string remedy;                                ///< what to do about a row that is no attention
};

/// Cuts a causal matrix to what each query can see and writes it: prompt rows of P keys, decode rows up to
/// their own key. Each row is checked (sim/row_rule.hpp). Holds the numbers it writes: one head.
void write_attention_head(TraceWriter& writer, const SequenceInfo& info, Index layer, Index head,
                          const SquareAttention& attention);

/// How the members of a group or directory are numbered: a prefix, then a number of at least so many digits.
struct Numbering {
  std::string_view prefix;
  int digits = 1;
  Index most = 0;  ///< numbers are below it

  [[nodiscard]] std::string name(Index number) const;
  /// The number in a name, if the name is exactly as name() makes it.
  [[nodiscard]] std::optional<Index> number(std::string_view name) const;
};

/// The numbers in these names, ascending. Throws TraceError for a name of another form.
[[nodiscard]] std::vector<Index> numbers_of(const Numbering& numbering, std::span<const std::string> names,
                                            const std::string& where);

/// Throws TraceError unless ascending `numbers` are 0, 1, ... count - 1: names the first that is missing or
/// too many.
void expect_numbered(const Numbering& numbering, std::span<const Index> numbers, Index count,
                     const std::string& where);

/// How many there are of ascending `numbers` that have no gap. Throws TraceError where one is missing.
[[nodiscard]] Index count_numbered(const Numbering& numbering, std::span<const Index> numbers,
                                   const std::string& where);

}  // namespace hae::traces
