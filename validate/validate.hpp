#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "validate/operation.hpp"

namespace hae::validate {

/// What became of one problem.
struct Outcome {
  enum class Status {
    passed,
    failed,
    unsupported,  ///< the kernel says so
    left_out,     ///< arrays beyond 2^31 elements, and no memory for them
  } status = Status::passed;
  std::string name;  ///< of the case
  std::set<std::string> features;
  Problem problem;                ///< of failed ones
  Results results;                ///< of their first call
  std::vector<Finding> findings;  ///< none unless failed
};

/// Throws ConfigError unless the table can be used: its ABI, its accumulation type, memory functions all or
/// none.
void check(const hae_kernels& kernels);

/// Calls a kernel five times and holds it to everything kernels.h says:
///
///   1  outputs and work space full of NaN: every element written, every verdict
///   2  the same: equal bytes?
///   3  outputs full of something else: equal bytes?
///      and twice beside a call with other numbers in another stream, where the table has one: equal bytes?
///   4  other numbers in the same shape, which leave their traces in whatever the kernel keeps
///   5  as the first, work space as the fourth call left it: equal bytes?
///
/// After each: guards and gaps of every array, and the inputs, are as they were.
[[nodiscard]] Outcome run(const hae_kernels& kernels, const Problem& problem);

/// The smallest problem that still fails in the same way: layout made plain, outputs and optional inputs left
/// away, then indices of every axis, then values. Delta debugging (Zeller and Hildebrandt, 2002), with at
/// most so many calls of run().
[[nodiscard]] Outcome shrink(const hae_kernels& kernels, const Outcome& failed, int most_runs = 500);

/// What the failing cases of one operation say about the fault: the first fault of the field that explains
/// most of them, or what they have in common and passing ones lack.
///
/// outcomes  of all its cases
[[nodiscard]] std::string diagnose(const hae_kernels& kernels, const std::vector<Outcome>& outcomes);

struct Options {
  std::uint64_t seed = 0;
  std::vector<std::string> operations;   ///< empty: all
  std::string one_case;                  ///< empty: all
  Index most_elements = Index{1} << 40;  ///< cases with more numbers in their inputs are left out
  std::vector<std::string> outputs;      ///< those that are asked for; empty: all that a case asks for
  std::function<void(const std::string& name, double done)> progress;  ///< before each case; may throw
};

/// What became of one operation.
struct OperationReport {
  std::string operation;
  bool offered = false;
  Index passed = 0;
  Index unsupported = 0;
  Index left_out = 0;
  Index failed = 0;
  std::vector<Outcome> outcomes;    ///< of all cases
  std::string fault;                ///< a guess; empty when nothing failed
  std::optional<Outcome> smallest;  ///< counterexample

  /// Nothing failed, and what is offered served at least one case.
  [[nodiscard]] bool right() const { return failed == 0 && (!offered || passed > 0); }
};

/// Runs the cases, and shrinks and explains the failures of each operation.
///
/// throws  ConfigError for an operation or a case that is none
[[nodiscard]] std::vector<OperationReport> validate(const hae_kernels& kernels, const Options& options);

/// Names of all cases of an operation, in order.
[[nodiscard]] std::vector<std::string> case_names(const Operation& operation);

/// The problem of a case. throws ConfigError for a name that is none
[[nodiscard]] Problem problem_of(const Operation& operation, const std::string& name, std::uint64_t seed);

}  // namespace hae::validate
