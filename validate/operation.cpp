#include "validate/operation.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "sim/errors.hpp"
#include "sim/text.hpp"

namespace hae::validate {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Arguments of an operation as its cases have them.
struct Forms {
  std::map<std::string, Tensor> inputs;
  std::map<std::string, Tensor> outputs;
  std::set<std::string> always;  ///< inputs that no case is without
  std::map<std::string, double> numbers;
};

Forms forms_of(const Operation& operation) {
  Forms forms;
  bool is_first = true;
  for (const Case& one : operation.cases()) {
    Draw draw(one.name, 0);
    const Problem problem = one.make(draw);
    std::set<std::string> here;
    for (Tensor input : problem.inputs) {
      input.values.clear();
      here.insert(input.name);
      forms.inputs.emplace(input.name, input);
    }
    for (const Tensor& output : problem.outputs) {
      forms.outputs.emplace(output.name, output);
    }
    forms.numbers = problem.numbers;
    std::erase_if(forms.always, [&](const std::string& name) { return !here.contains(name); });
    forms.always = is_first ? here : forms.always;
    is_first = false;
  }
  return forms;
}

bool is_form_of(const Tensor& tensor, const std::map<std::string, Tensor>& forms) {
  const auto form = forms.find(tensor.name);
  return form != forms.end() && form->second.axes == tensor.axes && form->second.counts == tensor.counts &&
         (is_float(tensor.type) ? is_float(form->second.type) : tensor.type == form->second.type);
}

/// How far an element is out, in bounds; 0 when it is right.
double excess(double expected, double got, double bound, bool sign_of_zero) {
  if (sign_of_zero && bound == 0 && expected == 0 && got == 0) {
    return std::signbit(expected) == std::signbit(got) ? 0 : kInfinity;
  }
  if (bound == kInfinity || expected == got || (std::isnan(expected) && std::isnan(got))) {
    return 0;
  }
  const double error = std::fabs(got - expected);
  if (error <= bound) {
    return 0;
  }
  return std::isfinite(error) && bound > 0 ? error / bound : kInfinity;
}

}  // namespace

const char* name_of(Finding::Kind kind) {
  switch (kind) {
    case Finding::Kind::status:
      return "status";
    case Finding::Kind::overrun:
      return "overrun";
    case Finding::Kind::unwritten:
      return "unwritten";
    case Finding::Kind::value:
      return "value";
    case Finding::Kind::choice:
      return "choice";
    case Finding::Kind::order:
      return "order";
    case Finding::Kind::score:
      return "score";
    case Finding::Kind::unstable:
      return "unstable";
    case Finding::Kind::residue:
      return "residue";
    case Finding::Kind::history:
      return "history";
    default:
      return "streams";
  }
}

const std::vector<const Operation*>& operations() {
  static const std::vector<const Operation*> all{&kAddScores, &kSelectLowest, &kSelectFromRows,
                                                 &kPrune,     &kCompact,      &kAttend};
  return all;
}

const Operation& operation_of(const std::string& name) {
  std::string known;
  for (const Operation* operation : operations()) {
    if (operation->name == name) {
      return *operation;
    }
    known += (known.empty() ? "" : ", ") + std::string(operation->name);
  }
  throw ConfigError("operation '" + name + "' is unknown; expected one of " + known);
}

bool is_essential(const std::string& output) {
  return output == "scores" || output == "chosen" || output == "evicted" || output == "kept";
}

void check_form(const Operation& operation, const Problem& problem) {
  const auto refuse = [&](const std::string& what) {
    throw ConfigError(std::string("operation ") + operation.name + ": " + what +
                      "; let hae validate write the file again");
  };
  const Forms forms = forms_of(operation);
  if (problem.layout.page_size > 0 && problem.input("lengths") == nullptr) {
    refuse("it is paged and has no lengths");
  }
  for (const auto& [name, number] : problem.numbers) {
    if (!std::isfinite(number)) {
      refuse(name + " is " + shortest(number) + ", expected a finite number");
    }
  }
  for (const Tensor& input : problem.inputs) {
    if (!is_form_of(input, forms.inputs)) {
      refuse("input '" + input.name +
             "' is none of its arguments, or has other axes or another kind of numbers");
    }
  }
  bool has_essential = operation.name == std::string("attend") && !problem.outputs.empty();
  for (const Tensor& output : problem.outputs) {
    if (!is_form_of(output, forms.outputs)) {
      refuse("output '" + output.name +
             "' is none of its results, or has other axes or another kind of numbers");
    }
    const std::string from = output.name.substr(0, output.name.rfind("_out"));
    const bool is_read_too = from != output.name || forms.inputs.contains(output.name);
    if (is_read_too && problem.input(from) == nullptr) {
      refuse("output '" + output.name + "' has no input '" + from + "'");
    }
    has_essential = has_essential || is_essential(output.name);
  }
  for (const std::string& name : forms.always) {
    const bool has_output = problem.output(name) != nullptr || forms.outputs.contains(name) == false;
    if (problem.input(name) == nullptr || !has_output) {
      refuse("input '" + name + "' is missing");
    }
  }
  for (const auto& [name, number] : forms.numbers) {
    if (!problem.numbers.contains(name)) {
      refuse("number '" + name + "' is missing");
    }
  }
  const bool has_window = problem.numbers.contains("window") && problem.number("window") != 0;
  if (!has_essential || (has_window && problem.input("query_positions") == nullptr) ||
      (problem.layout.page_size > 0 && operation.name != std::string("attend"))) {
    refuse("no result is asked for, a window lacks query_positions, or pages are asked of what has none");
  }
}

void compare(const Problem& problem, const std::string& output, const std::vector<double>& got,
             const Expected& expected, std::vector<Finding>& findings) {
  HAE_EXPECTS(got.size() == expected.values.size() && got.size() == expected.bounds.size());
  Index worst = -1;
  double most = 0;
  Index wrong = 0;
  for (Index i = 0; i < std::ssize(got); ++i) {
    const double by =
        excess(expected.values[at(i)], got[at(i)], expected.bounds[at(i)], expected.sign_of_zero);
    wrong += by > 0;
    if (by > most) {
      most = by;
      worst = i;
    }
  }
  if (worst < 0) {
    return;
  }
  Finding finding;
  finding.array = output;
  finding.place = place_of(problem, *problem.output(output), worst);
  finding.expected = expected.values[at(worst)];
  finding.got = got[at(worst)];
  finding.bound = expected.bounds[at(worst)];
  finding.wrong = wrong;
  finding.text = output + finding.place + ": expected " + shortest(finding.expected) + ", got " +
                 shortest(finding.got) +
                 (finding.bound > 0 ? ", off by " + shortest(std::fabs(finding.got - finding.expected)) +
                                          ", bound " + shortest(finding.bound)
                                    : ", which is exact") +
                 "; " + std::to_string(wrong) + " of " + std::to_string(got.size()) + " elements are wrong";
  findings.push_back(std::move(finding));
}

std::vector<bool> all_defined(const Problem& problem, const Tensor& output) {
  return std::vector<bool>(at(problem.size(output)), true);
}

std::vector<bool> defined_below_length(const Problem& problem, const Tensor& output) {
  std::vector<bool> defined(at(problem.size(output)), true);
  const Tensor* lengths = problem.input("lengths");
  const auto axis = std::ranges::find(output.axes, Axis::slots);
  if (lengths == nullptr || axis == output.axes.end()) {
    return defined;
  }
  const std::vector<Index> shape = problem.shape(output);
  for (Index i = 0; i < std::ssize(defined); ++i) {
    Index rest = i;
    std::vector<Index> index(shape.size());
    for (std::size_t a = shape.size(); a-- > 0;) {
      index[a] = rest % shape[a];
      rest /= shape[a];
    }
    Index lane = 0;
    for (std::size_t a = 0; a < lengths->axes.size(); ++a) {
      lane = lane * shape[a] + index[a];
    }
    defined[at(i)] = double(index[at(axis - output.axes.begin())]) < lengths->values[at(lane)];
  }
  return defined;
}

const std::vector<Index>& boundary_sizes() {
  static const std::vector<Index> sizes{0,   1,   2,   31,  32,   33,   63,   64,   65,   127, 128,
                                        129, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097};
  return sizes;
}

std::optional<Problem> with_values(const Problem& problem, const std::string& input,
                                   const std::function<double(double)>& change) {
  Problem altered = problem;
  Tensor* tensor = altered.input(input);
  if (tensor == nullptr) {
    return std::nullopt;
  }
  bool changed = false;
  for (double& value : tensor->values) {
    const double before = value;
    value = change(value);
    changed = changed || (value != before && !(std::isnan(value) && std::isnan(before)));
  }
  return changed ? std::optional(altered) : std::nullopt;
}

std::optional<Problem> flushed(const Problem& problem, const std::string& input) {
  const double least = format_of(problem.input(input)->type).smallest_normal();
  return with_values(problem, input, [least](double x) { return std::fabs(x) < least ? 0.0 : x; });
}

std::optional<Problem> with_number(const Problem& problem, const std::string& name, double value) {
  if (problem.number(name) == value) {
    return std::nullopt;
  }
  Problem altered = problem;
  altered.numbers[name] = value;
  return altered;
}

std::optional<Problem> without_input(const Problem& problem, const std::string& name) {
  if (problem.input(name) == nullptr) {
    return std::nullopt;
  }
  Problem altered = problem;
  std::erase_if(altered.inputs, [&](const Tensor& tensor) { return tensor.name == name; });
  return altered;
}

std::vector<Suspicion> joined(const std::vector<std::vector<Suspicion>>& lists) {
  std::vector<Suspicion> all;
  for (const std::vector<Suspicion>& list : lists) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

std::vector<Suspicion> row_suspicions() {
  return {
      {"only the first query head of each lane is counted",
       [](const Problem& p) -> std::optional<Problem> {
         const Index group = p.extent(Axis::group);
         return group > 1 ? std::optional(without(p, Axis::group, 1, group)) : std::nullopt;
       }},
      {"the last row is left out",
       [](const Problem& p) -> std::optional<Problem> {
         const Index rows = p.extent(Axis::rows);
         return rows > 0 ? std::optional(without(p, Axis::rows, rows - 1, rows)) : std::nullopt;
       }},
      {"only the last row is counted",
       [](const Problem& p) -> std::optional<Problem> {
         const Index rows = p.extent(Axis::rows);
         return rows > 1 ? std::optional(without(p, Axis::rows, 0, rows - 1)) : std::nullopt;
       }},
  };
}

std::vector<Suspicion> length_suspicions() {
  const auto lengths = [](std::string fault, const std::function<double(double, double)>& change) {
    return Suspicion{
        std::move(fault), [change](const Problem& problem) -> std::optional<Problem> {
          Problem given = problem;  // absent lengths are those of all slots
          const auto slots = double(problem.extent(Axis::slots));
          if (given.input("lengths") == nullptr) {
            std::vector<Axis> axes{problem.extents.contains(Axis::items) ? Axis::items : Axis::lanes};
            if (problem.operation == std::string("attend")) {
              axes.push_back(Axis::lanes);
            }
            Tensor all = tensor("lengths", Type::int64, axes, {}, Axis::slots);
            all.values.assign(at(problem.size(all)), slots);
            given.inputs.push_back(all);
          }
          return with_values(given, "lengths",
                             [&](double n) { return std::clamp(change(n, slots), 0.0, slots); });
        }};
  };
  std::vector<Suspicion> all{
      lengths("the last slot of every lane is left out", [](double n, double) { return n - 1; }),
      lengths("one slot beyond the length is taken in", [](double n, double) { return n + 1; }),
      lengths("lengths are ignored: padding is taken in", [](double, double slots) { return slots; }),
  };
  for (const int block : {16, 32, 64, 128, 256}) {
    all.push_back(lengths("the last, partial block of " + std::to_string(block) + " slots is skipped",
                          [block](double n, double) { return std::floor(n / block) * block; }));
  }
  all.push_back(
      {"the length of lane 0 is used for every lane", [](const Problem& problem) -> std::optional<Problem> {
         const Tensor* given = problem.input("lengths");
         if (given == nullptr || given->values.empty()) {
           return std::nullopt;
         }
         const double first = given->values.front();
         return with_values(problem, "lengths", [first](double) { return first; });
       }});
  return all;
}

}  // namespace hae::validate
