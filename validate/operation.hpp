#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "validate/bound.hpp"
#include "validate/draw.hpp"
#include "validate/own_arithmetic.hpp"
#include "validate/placement.hpp"
#include "validate/problem.hpp"

namespace hae::validate {

/// What is wrong with one call.
struct Finding {
  enum class Kind {
    status,     ///< the kernel returned an error
    overrun,    ///< written where it may not write
    unwritten,  ///< an element of an output was left as it was
    value,      ///< further from the reference than its bound
    choice,     ///< a wrong set of tokens
    order,      ///< the right set in a wrong order
    score,      ///< a score that is not its token's
    unstable,   ///< equal calls, other bytes
    residue,    ///< other bytes when outputs or work space held something else before
    history,    ///< other bytes after a call with other numbers
    streams,    ///< other bytes while a call in another stream is on its way
  } kind = Kind::value;
  std::string array;  ///< as in kernels.h
  std::string place;  ///< of the worst element: `[0, 3, 17]`
  double expected = 0;
  double got = 0;
  double bound = 0;
  Index wrong = 0;   ///< elements
  std::string text;  ///< the whole of it, for people
};

[[nodiscard]] const char* name_of(Finding::Kind kind);

/// The contents of outputs after a call, by name.
using Results = std::map<std::string, std::vector<double>>;

/// A case by name; the numbers follow from the name and the seed.
struct Case {
  std::string name;
  std::function<Problem(Draw&)> make;
};

/// Work space of so many bytes, and where to run.
using ContextOf = std::function<hae_context(std::int64_t bytes)>;

/// A fault that the field knows.
struct Suspicion {
  std::string fault;
  /// The problem to whose right answer it leads; none where it makes no difference.
  std::function<std::optional<Problem>(const Problem&)> alter;
  /// Or whether the findings are what it leads to.
  std::function<bool(const Problem&, const Results&, const std::vector<Finding>&)> explains{};
};

/// One operation of kernels.h: its cases, its reference and its verdicts.
struct Operation {
  const char* name;
  std::vector<Case> (*cases)();

  /// Whether a table has it.
  bool (*offered)(const hae_kernels&);

  /// Calls it; returns its status.
  std::int32_t (*call)(const hae_kernels&, const Problem&, const Placement&, const ContextOf&);

  /// Compares with the reference; the worst element of each output that is wrong.
  std::vector<Finding> (*judge)(const Problem&, const Results&, const Arithmetic&);

  /// Whether what an element of an output holds is defined: the rest may change from call to call.
  std::vector<bool> (*defined)(const Problem&, const Tensor& output);

  std::vector<Suspicion> (*suspicions)();
};

extern const Operation kAddScores;
extern const Operation kSelectLowest;
extern const Operation kSelectFromRows;
extern const Operation kPrune;
extern const Operation kCompact;
extern const Operation kAttend;

/// All of them, in the order of kernels.h.
[[nodiscard]] const std::vector<const Operation*>& operations();

/// throws  ConfigError for a name that is none
[[nodiscard]] const Operation& operation_of(const std::string& name);

/// Whether an output is the operation's point: scores, chosen, evicted, kept. The others need not be asked
/// for.
[[nodiscard]] bool is_essential(const std::string& output);

/// throws  ConfigError that names what is wrong when a problem from elsewhere is not of the form of this
///         operation's cases: arguments, their axes and kinds, numbers, layout
void check_form(const Operation& operation, const Problem& problem);

// ---- for the operations

/// What a reference says of one output: elements with an infinite bound are not looked at; a NaN must be met
/// by a NaN, an infinity by itself.
struct Expected {
  std::vector<double> values;
  std::vector<double> bounds;
  bool sign_of_zero = false;  ///< whether -0 and +0 differ
};

/// Adds the worst element to the findings, if one is out of bounds. The comparison is !(error <= bound), so
/// that a NaN fails.
void compare(const Problem& problem, const std::string& output, const std::vector<double>& got,
             const Expected& expected, std::vector<Finding>& findings);

[[nodiscard]] std::vector<bool> all_defined(const Problem& problem, const Tensor& output);

/// Whether the element's slot is below its lane's length. For outputs with an axis of slots, and lengths that
/// have the leading axes of the output.
[[nodiscard]] std::vector<bool> defined_below_length(const Problem& problem, const Tensor& output);

template <typename Arguments>
std::int32_t launch(const hae_kernels& kernels, std::int32_t operation,
                    std::int32_t (*kernel)(const Arguments*, const hae_context*), const Arguments& arguments,
                    const ContextOf& context_of) {
  std::int64_t bytes = 0;
  if (kernels.workspace_bytes != nullptr) {
    const OwnArithmetic::Theirs theirs;
    bytes = kernels.workspace_bytes(operation, &arguments);
  }
  const hae_context context = context_of(bytes);
  const OwnArithmetic::Theirs theirs;
  return kernel(&arguments, &context);
}

/// The sizes at which warps, blocks and tiles begin and end.
[[nodiscard]] const std::vector<Index>& boundary_sizes();

[[nodiscard]] inline Tensor tensor(std::string name, Type type, std::vector<Axis> axes,
                                   std::vector<double> values = {}, std::optional<Axis> counts = {}) {
  return {std::move(name), type, std::move(axes), std::move(values), counts};
}

/// The lists one after the other: of faults that explain as much, the first is named.
[[nodiscard]] std::vector<Suspicion> joined(const std::vector<std::vector<Suspicion>>& lists);

/// Faults of sums over query heads and rows of `probabilities`.
[[nodiscard]] std::vector<Suspicion> row_suspicions();

/// Faults of lengths, which every operation with `lengths` over an axis can have.
[[nodiscard]] std::vector<Suspicion> length_suspicions();

/// Input values replaced one by one; none when nothing changed or there is no such input.
[[nodiscard]] std::optional<Problem> with_values(const Problem& problem, const std::string& input,
                                                 const std::function<double(double)>& change);

/// Subnormal numbers of an input replaced by 0.
[[nodiscard]] std::optional<Problem> flushed(const Problem& problem, const std::string& input);

/// A number replaced; none when it is the same.
[[nodiscard]] std::optional<Problem> with_number(const Problem& problem, const std::string& name,
                                                 double value);

/// An optional input taken away; none when it is absent.
[[nodiscard]] std::optional<Problem> without_input(const Problem& problem, const std::string& name);

}  // namespace hae::validate
