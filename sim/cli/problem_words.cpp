#include "sim/cli/problem_words.hpp"

#include <fmt/format.h>

#include "sim/errors.hpp"

namespace hae::cli {
namespace {

using validate::Axis;
using validate::Layout;
using validate::Tensor;

constexpr const char* kNone = "none";

traces::StoredTensor stored(const Tensor& tensor) {
  traces::StoredTensor words{tensor.name, validate::name_of(tensor.type), {}, kNone, tensor.values};
  for (const Axis axis : tensor.axes) {
    words.axes.emplace_back(validate::name_of(axis));
  }
  if (tensor.counts) {
    words.counts = validate::name_of(*tensor.counts);
  }
  return words;
}

Tensor tensor_of(const traces::StoredTensor& words) {
  Tensor tensor{words.name, validate::type_of(words.type.c_str()), {}, words.values};
  for (const std::string& axis : words.axes) {
    tensor.axes.push_back(validate::axis_of(axis));
  }
  if (words.counts != kNone) {
    tensor.counts = validate::axis_of(words.counts);
  }
  return tensor;
}

Layout layout_of(const std::vector<std::pair<std::string, Index>>& words) {
  Layout layout;
  for (const auto& [name, value] : words) {
    const Index most = name == "page_size" ? Index{1} << 20 : name == "order" ? 2 : 1;
    if (value < 0 || value > most) {
      throw ConfigError(fmt::format("layout {} is {}, expected 0 .. {}", name, value, most));
    }
    if (name == "page_size") {
      layout.page_size = value;
    } else if (name == "order") {
      layout.order = static_cast<Layout::Order>(value);
    } else if (name == "misaligned") {
      layout.misaligned = value != 0;
    } else if (name == "in_place") {
      layout.in_place = value != 0;
    } else if (name == "far") {
      layout.far = value != 0;
    } else {
      throw ConfigError(
          fmt::format("layout '{}' is unknown; expected page_size, order, misaligned, in_place, far", name));
    }
  }
  return layout;
}

}  // namespace

traces::StoredProblem stored(const validate::Outcome& outcome) {
  const validate::Problem& problem = outcome.problem;
  traces::StoredProblem words{problem.operation, outcome.name};
  for (const auto& [axis, extent] : problem.extents) {
    words.extents.emplace_back(validate::name_of(axis), extent);
  }
  words.layout = {{"page_size", problem.layout.page_size},
                  {"order", static_cast<Index>(problem.layout.order)},
                  {"misaligned", problem.layout.misaligned},
                  {"in_place", problem.layout.in_place},
                  {"far", problem.layout.far}};
  words.numbers.assign(problem.numbers.begin(), problem.numbers.end());
  for (const Tensor& tensor : problem.inputs) {
    words.inputs.push_back(stored(tensor));
  }
  for (const Tensor& tensor : problem.outputs) {
    words.outputs.push_back(stored(tensor));
  }
  return words;
}

validate::Problem problem_of(const traces::StoredProblem& words) {
  validate::Problem problem;
  problem.operation = validate::operation_of(words.operation).name;
  for (const auto& [axis, extent] : words.extents) {
    problem.extents[validate::axis_of(axis)] = extent;
  }
  problem.numbers.insert(words.numbers.begin(), words.numbers.end());
  problem.layout = layout_of(words.layout);
  for (const traces::StoredTensor& tensor : words.inputs) {
    problem.inputs.push_back(tensor_of(tensor));
  }
  for (const traces::StoredTensor& tensor : words.outputs) {
    problem.outputs.push_back(tensor_of(tensor));
  }
  validate::check(problem);
  validate::check_form(validate::operation_of(words.operation), problem);
  return problem;
}

}  // namespace hae::cli
