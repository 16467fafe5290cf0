#include "validate/problem.hpp"

#include <algorithm>
#include <cmath>

#include "sim/errors.hpp"
#include "sim/text.hpp"

namespace hae::validate {
namespace {

constexpr std::pair<Axis, const char*> kAxes[] = {
    {Axis::items, "items"}, {Axis::lanes, "lanes"},       {Axis::group, "group"}, {Axis::rows, "rows"},
    {Axis::slots, "slots"}, {Axis::head_dim, "head_dim"}, {Axis::most, "most"},
};

template <typename Tensors>
auto* find(Tensors& tensors, const std::string& name) {
  const auto found = std::ranges::find_if(tensors, [&](const Tensor& tensor) { return tensor.name == name; });
  return found == tensors.end() ? nullptr : &*found;
}

/// The values without indices [begin, end) of one axis.
std::vector<double> without(const std::vector<double>& values, const std::vector<Index>& shape,
                            std::size_t axis, Index begin, Index end) {
  Index inner = 1;
  for (std::size_t a = axis + 1; a < shape.size(); ++a) {
    inner *= shape[a];
  }
  std::vector<double> left;
  for (Index i = 0; i < std::ssize(values); ++i) {
    const Index along = (i / inner) % shape[axis];
    if (along < begin || along >= end) {
      left.push_back(values[at(i)]);
    }
  }
  return left;
}

}  // namespace

const char* name_of(Axis axis) {
  return std::ranges::find(kAxes, axis, [](const auto& entry) { return entry.first; })->second;
}

Axis axis_of(const std::string& name) {
  for (const auto& [axis, word] : kAxes) {
    if (name == word) {
      return axis;
    }
  }
  throw ConfigError("axis '" + name +
                    "' is unknown; expected items, lanes, group, rows, slots, head_dim or most");
}

Index Problem::extent(Axis axis) const {
  const auto found = extents.find(axis);
  HAE_EXPECTS(found != extents.end());
  return found->second;
}

std::vector<Index> Problem::shape(const Tensor& tensor) const {
  std::vector<Index> extents_of;
  for (const Axis axis : tensor.axes) {
    extents_of.push_back(extent(axis));
  }
  return extents_of;
}

Index Problem::size(const Tensor& tensor) const {
  Index count = 1;
  for (const Index extent_of : shape(tensor)) {
    count *= extent_of;
  }
  return count;
}

const Tensor* Problem::input(const std::string& name) const {
  return find(inputs, name);
}

Tensor* Problem::input(const std::string& name) {
  return find(inputs, name);
}

const Tensor* Problem::output(const std::string& name) const {
  return find(outputs, name);
}

const std::vector<double>& Problem::values(const std::string& name) const {
  const Tensor* tensor = input(name);
  HAE_EXPECTS(tensor != nullptr);
  return tensor->values;
}

double Problem::number(const std::string& name) const {
  const auto found = numbers.find(name);
  HAE_EXPECTS(found != numbers.end());
  return found->second;
}

double Problem::value_or(const std::string& name, Index index, double otherwise) const {
  const Tensor* tensor = input(name);
  return tensor == nullptr ? otherwise : tensor->values[at(index)];
}

Problem without(const Problem& problem, Axis axis, Index begin, Index end) {
  Problem left = problem;
  for (Tensor& tensor : left.inputs) {
    const std::vector<Index> shape = problem.shape(tensor);
    for (std::size_t a = 0; a < shape.size(); ++a) {
      if (tensor.axes[a] == axis) {
        tensor.values = without(tensor.values, shape, a, begin, end);
      }
    }
    if (tensor.counts == axis) {
      for (double& count : tensor.values) {
        count -= std::clamp(count, double(begin), double(end)) - double(begin);
      }
    }
  }
  left.extents[axis] -= end - begin;
  return left;
}

std::set<std::string> features(const Problem& problem) {
  std::set<std::string> found;
  for (const Tensor& tensor : problem.inputs) {
    if (is_float(tensor.type)) {
      found.insert(std::string(name_of(tensor.type)) + " " + tensor.name);
      if (std::ranges::any_of(tensor.values, [](double value) { return std::isnan(value); })) {
        found.insert("NaN in " + tensor.name);
      }
    } else {
      found.insert(tensor.name + " given");
    }
  }
  for (const Tensor& tensor : problem.outputs) {
    found.insert(tensor.name + " asked for");
  }
  for (const auto& [axis, extent] : problem.extents) {
    const std::string name = name_of(axis);
    found.insert(extent > 1 ? "more than one of " + name : "at most one of " + name);
    for (const Index most : {4, 8, 32, 128, 1024, 65535}) {
      if (extent > most) {
        found.insert("more than " + std::to_string(most) + " " + name);
      }
    }
    if (extent % 32 != 0) {
      found.insert(name + " not a multiple of 32");
    }
  }
  if (problem.layout.order == Layout::Order::padded) {
    found.insert("padded rows");
  }
  if (problem.layout.order == Layout::Order::token_major) {
    found.insert("token-major memory");
  }
  if (problem.layout.misaligned) {
    found.insert("misaligned arrays");
  }
  if (problem.layout.in_place) {
    found.insert("in place");
  }
  if (problem.layout.page_size > 0) {
    found.insert("paged");
  }
  if (problem.layout.far) {
    found.insert("offsets beyond 2^31");
  }
  return found;
}

std::string describe(const Problem& problem) {
  std::string text;
  for (const auto& [axis, extent] : problem.extents) {
    text += (text.empty() ? "" : ", ") + std::string(name_of(axis)) + " " + std::to_string(extent);
  }
  for (const auto& [name, number] : problem.numbers) {
    text += ", " + name + " " + shortest(number);
  }
  const Layout& layout = problem.layout;
  text += layout.page_size > 0 ? ", pages of " + std::to_string(layout.page_size) : "";
  text += layout.order == Layout::Order::padded        ? ", padded rows"
          : layout.order == Layout::Order::token_major ? ", token-major"
                                                       : "";
  text += layout.misaligned ? ", misaligned" : "";
  text += layout.in_place ? ", in place" : "";
  text += layout.far ? ", offsets beyond 2^31" : "";
  return text;
}

std::vector<std::string> written_out(const Problem& problem) {
  constexpr Index kMostNumbers = 16;
  const auto joined = [](const auto& numbers) {
    std::string text;
    for (const auto number : numbers) {
      text += (text.empty() ? "" : ", ") + shortest(number);
    }
    return text;
  };
  std::vector<std::string> lines;
  for (const Tensor& input : problem.inputs) {
    if (std::ssize(input.values) <= kMostNumbers) {
      lines.push_back(input.name + " [" + joined(problem.shape(input)) + "] = " + joined(input.values));
    }
  }
  return lines;
}

std::string place_of(const Problem& problem, const Tensor& tensor, Index index) {
  const std::vector<Index> shape = problem.shape(tensor);
  std::string text;
  for (std::size_t a = shape.size(); a-- > 0;) {
    text = std::to_string(index % shape[a]) + (text.empty() ? "" : ", ") + text;
    index /= shape[a];
  }
  return "[" + text + "]";
}

void check(const Problem& problem) {
  const auto refuse = [&](const std::string& what) {
    throw ConfigError("operation " + problem.operation + ": " + what +
                      "; let hae validate write the file again");
  };
  constexpr Index kMost = Index{1} << 24;
  for (const auto& [axis, extent] : problem.extents) {
    if (extent < 0 || extent > kMost) {
      refuse(std::string("extent of ") + name_of(axis) + " is " + std::to_string(extent) +
             ", expected 0 .. 2^24");
    }
  }
  const auto check_axes = [&](const Tensor& tensor) {
    Index size = 1;
    for (const Axis axis : tensor.axes) {
      if (!problem.extents.contains(axis)) {
        refuse(tensor.name + " has an axis " + name_of(axis) + " without an extent");
      }
      size *= problem.extent(axis);  // both at most 2^24 before, so no product overflows
      if (size > kMost) {
        refuse(tensor.name + " has more than 2^24 elements");
      }
    }
  };
  for (const Tensor& tensor : problem.outputs) {
    check_axes(tensor);
  }
  for (const Tensor& tensor : problem.inputs) {
    check_axes(tensor);
    if (std::ssize(tensor.values) != problem.size(tensor)) {
      refuse(tensor.name + " has " + std::to_string(tensor.values.size()) + " values, expected " +
             std::to_string(problem.size(tensor)));
    }
    for (const double value : tensor.values) {
      if (!std::isnan(value) && rounded(tensor.type, value) != value) {
        refuse(tensor.name + " has " + shortest(value) + ", which is no " + name_of(tensor.type));
      }
      const bool is_count = tensor.counts.has_value();
      if (!is_float(tensor.type) &&
          !(std::fabs(value) < 0x1p31 &&
            (!is_count || (value >= 0 && value <= double(problem.extent(*tensor.counts)))))) {
        refuse(tensor.name + " has " + shortest(value) +
               (is_count ? ", beyond its axis" : ", expected below 2^31"));
      }
    }
  }
}

}  // namespace hae::validate
