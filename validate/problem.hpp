#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "validate/number.hpp"

namespace hae::validate {

/// What an axis of an array counts. A problem has one extent for each, so a slice of the problem is a slice
/// of every array along that axis: that is how counterexamples shrink.
enum class Axis {
  items,  ///< sequences of a batch
  lanes,  ///< caches that evict on their own: KV heads, where there are query heads too
  group,  ///< query heads of a lane; a kernel sees lanes and group as one axis, query_heads
  rows,   ///< queries
  slots,  ///< places of a cache, or tokens
  head_dim,
  most,  ///< of a list of choices
};

[[nodiscard]] const char* name_of(Axis axis);

/// throws  ConfigError for a word that names no axis
[[nodiscard]] Axis axis_of(const std::string& name);

/// One argument of a kernel, by what it means; where its bytes lie is the placement's affair.
struct Tensor {
  std::string name;  ///< as in kernels.h
  Type type = Type::float32;
  std::vector<Axis> axes;
  std::vector<double> values;    ///< row-major, each a number of the type; empty for a pure output
  std::optional<Axis> counts{};  ///< the values count indices of this axis, from 0
};

/// How arrays lie in memory.
struct Layout {
  enum class Order {
    dense,        ///< row-major, nothing between
    padded,       ///< row-major, rows longer than they need to be
    token_major,  ///< outer axes in the opposite order: [.., slots, lanes, head_dim]
  } order = Order::dense;
  bool misaligned = false;  ///< aligned to one element only
  bool in_place = false;    ///< compact: outputs are their inputs
  Index page_size = 0;      ///< attend: keys and values in pages of so many slots; 0: not paged
  /// The largest arrays reach beyond 2^31 elements: few elements, their outermost axis spread out.
  bool far = false;
};

/// One call of one operation: everything but addresses.
struct Problem {
  std::string operation;
  std::map<Axis, Index> extents;
  std::vector<Tensor> inputs;             ///< of what is in and out: the contents before
  std::vector<Tensor> outputs;            ///< without values; a name that is an input's is in and out
  std::map<std::string, double> numbers;  ///< scalars, by the names of kernels.h
  Layout layout;

  [[nodiscard]] Index extent(Axis axis) const;
  [[nodiscard]] Index size(const Tensor& tensor) const;
  [[nodiscard]] std::vector<Index> shape(const Tensor& tensor) const;

  /// null if there is none
  [[nodiscard]] const Tensor* input(const std::string& name) const;
  [[nodiscard]] Tensor* input(const std::string& name);
  [[nodiscard]] const Tensor* output(const std::string& name) const;
  /// throws  ContractViolation if there is none
  [[nodiscard]] const std::vector<double>& values(const std::string& name) const;
  [[nodiscard]] double number(const std::string& name) const;
  [[nodiscard]] bool flag(const std::string& name) const { return number(name) != 0; }

  /// An entry of an optional per-lane input, or what stands for it when it is absent.
  [[nodiscard]] double value_or(const std::string& name, Index index, double otherwise) const;
};

/// The problem without the indices [begin, end) of an axis; counts along it are lowered by what they lose.
[[nodiscard]] Problem without(const Problem& problem, Axis axis, Index begin, Index end);

/// What stands out about a problem, for what failing cases have in common: "paged", "grouped heads", ...
[[nodiscard]] std::set<std::string> features(const Problem& problem);

/// `items 1, lanes 2, slots 33`, and what is not plain about it.
[[nodiscard]] std::string describe(const Problem& problem);

/// `keys [1, 2, 1, 1] = 0, 1`: each input of a counterexample that is short enough to be read.
[[nodiscard]] std::vector<std::string> written_out(const Problem& problem);

/// Row-major indices of element `index`: `[0, 3, 17]`.
[[nodiscard]] std::string place_of(const Problem& problem, const Tensor& tensor, Index index);

/// throws  ConfigError that names what is wrong when a problem from a file is not one: sizes, values that are
///         no numbers of their type, counts and indices beyond their axes
void check(const Problem& problem);

}  // namespace hae::validate
