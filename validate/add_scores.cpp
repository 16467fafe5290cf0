#include <algorithm>
#include <cmath>
#include <limits>

#include "validate/operation.hpp"

// Cumulative attention: prefill score sums with DAP's row maximum, and with one row the update of a decode
// step.

namespace hae::validate {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

enum class Values { ordinary, equal, subnormal, nan };

struct Form {
  Type type = Type::float32;
  Index items = 1;
  Index lanes = 1;
  Index group = 1;
  Index rows = 1;
  Index slots = 1;
  int reduction = HAE_MEAN;
  bool lengths = false;
  bool counted = false;
  bool largest = false;
  Type scores = Type::float32;
  Layout layout;
  Values values = Values::ordinary;
};

std::string name_of(const Form& form, const char* what) {
  return std::string("add_scores/") + what + "/" + validate::name_of(form.type) + "/slots-" +
         std::to_string(form.slots) + "/rows-" + std::to_string(form.rows);
}

/// One probability: skewed, as attention is, and about 1 / slots.
double probability(const Form& form, Draw& draw) {
  const double mean = 1 / double(std::max(form.slots, Index{1}));
  switch (form.values) {
    case Values::equal:
      return mean;
    case Values::subnormal:
      return draw.unit() * format_of(form.type).smallest_normal();
    default: {
      const double u = draw.unit();
      return 4 * u * u * u * mean;
    }
  }
}

Problem make(const Form& form, Draw& draw) {
  Problem problem;
  problem.operation = "add_scores";
  problem.extents = {{Axis::items, form.items},
                     {Axis::lanes, form.lanes},
                     {Axis::group, form.group},
                     {Axis::rows, form.rows},
                     {Axis::slots, form.slots}};
  problem.numbers["reduction"] = form.reduction;
  problem.layout = form.layout;
  std::vector<double> lengths;
  for (Index item = 0; item < form.items; ++item) {
    lengths.push_back(double(form.lengths ? draw.integer(0, form.slots) : form.slots));
  }
  Tensor rows =
      tensor("probabilities", form.type, {Axis::items, Axis::lanes, Axis::group, Axis::rows, Axis::slots});
  const Index rows_of_item = form.lanes * form.group * form.rows;
  for (Index i = 0; i < form.items * rows_of_item * form.slots; ++i) {
    const bool padding = double(i % form.slots) >= lengths[at(i / (rows_of_item * form.slots))];
    const bool is_nan = form.values == Values::nan && draw.integer(0, 40) == 0;
    rows.values.push_back(padding || is_nan ? std::nan("") : rounded(form.type, probability(form, draw)));
  }
  problem.inputs.push_back(std::move(rows));
  if (form.lengths) {
    problem.inputs.push_back(tensor("lengths", Type::int64, {Axis::items}, lengths, Axis::slots));
  }
  if (form.counted) {
    Tensor counted = tensor("counted", Type::uint8, {Axis::items, Axis::rows});
    for (Index i = 0; i < form.items * form.rows; ++i) {
      counted.values.push_back(double(draw.integer(0, 3) != 0));
    }
    problem.inputs.push_back(std::move(counted));
  }
  const std::vector<Axis> axes{Axis::items, Axis::lanes, Axis::slots};
  for (const char* name : {"scores", "largest"}) {
    if (name[0] == 's' || form.largest) {
      Tensor before = tensor(name, form.scores, axes);
      for (Index i = 0; i < form.items * form.lanes * form.slots; ++i) {
        before.values.push_back(rounded(form.scores, draw.unit() / double(form.slots)));
      }
      problem.inputs.push_back(before);
      problem.outputs.push_back(tensor(name, form.scores, axes));
    }
  }
  return problem;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const Form& form, const char* what) {
    all.push_back({name_of(form, what), [form](Draw& draw) { return make(form, draw); }});
  };
  constexpr Layout::Order kOrders[] = {Layout::Order::dense, Layout::Order::padded,
                                       Layout::Order::token_major};
  int i = 0;
  for (const Index slots : boundary_sizes()) {
    for (const Type type : {Type::float32, Type::float16, Type::bfloat16}) {
      Form form{.type = type, .lanes = 1 + i % 3, .group = Index{1} << (i % 2 * 2), .slots = slots};
      form.items = slots > 1000 ? 1 : 1 + i % 2;
      form.scores = i % 4 == 0 ? Type::float64 : Type::float32;
      add(form, "decode");
      form.rows = 2 + i % 4;
      form.reduction = i % 3;
      form.lengths = true;
      form.counted = i % 2 == 0;
      form.largest = i % 3 != 1;
      form.layout = {.order = kOrders[(i / 2) % 3], .misaligned = i % 5 == 0};
      add(form, "prefill");
      ++i;
    }
  }
  for (const Index rows : boundary_sizes()) {
    add({.type = Type::float16, .group = 2, .rows = rows, .slots = 3, .largest = true}, "many-rows");
  }
  add({.rows = 4096, .slots = 1, .values = Values::equal}, "all-equal");
  add({.type = Type::float16, .group = 8, .rows = 700, .slots = 5, .values = Values::equal}, "all-equal");
  add({.type = Type::bfloat16, .group = 4, .rows = 333, .slots = 7, .values = Values::equal}, "all-equal");
  for (const Type type : {Type::float16, Type::bfloat16}) {
    add({.type = type, .group = 2, .rows = 5, .slots = 65, .largest = true, .values = Values::subnormal},
        "subnormal");
    add({.type = type, .lanes = 2, .rows = 3, .slots = 33, .values = Values::nan}, "nan");
  }
  add({.lanes = 2, .group = 2, .rows = 3, .slots = 65, .largest = true, .values = Values::nan}, "nan");
  add({.items = 5, .lanes = 9, .group = 7, .rows = 3, .slots = 33, .lengths = true, .largest = true},
      "many-heads");
  add({.items = 0, .rows = 2, .slots = 33}, "empty-batch");
  add({.items = 65537, .slots = 2}, "65537-items");
  for (const Type type : {Type::float32, Type::float16}) {
    add({.type = type, .items = 2, .lanes = 2, .group = 2, .rows = 3, .slots = 33, .layout = {.far = true}},
        "far");
  }
  return all;
}

/// The sums and maxima of one slot over the counted rows.
struct Column {
  long double sum = 0;
  long double largest = 0;
  Index rows = 0;
};

Column column_of(const Problem& problem, Index item, Index lane, Index slot) {
  const Index group = problem.extent(Axis::group);
  const Index rows = problem.extent(Axis::rows);
  const Index slots = problem.extent(Axis::slots);
  const std::vector<double>& probabilities = problem.values("probabilities");
  const int reduction = int(problem.number("reduction"));
  Column column;
  for (Index row = 0; row < rows; ++row) {
    if (problem.value_or("counted", item * rows + row, 1) == 0) {
      continue;
    }
    long double value = 0;
    for (Index head = 0; head < group; ++head) {
      const Index query_head = (item * problem.extent(Axis::lanes) + lane) * group + head;
      const long double p = probabilities[at((query_head * rows + row) * slots + slot)];
      value = reduction == HAE_MAX && !std::isnan(p) ? std::max(value, p) : value + p;
    }
    value /= reduction == HAE_MEAN ? group : 1;
    column.sum += value;
    column.largest = std::max(column.largest, value);
    ++column.rows;
  }
  return column;
}

/// docs/validate.md, "Score sums".
std::vector<Finding> judge(const Problem& problem, const Results& results, const Arithmetic& arithmetic) {
  Expected scores;
  Expected largest;
  const Tensor& out = *problem.output("scores");
  const Index slots = problem.extent(Axis::slots);
  const Index lanes = problem.extent(Axis::lanes);
  const bool wants_largest = problem.output("largest") != nullptr;
  const double group = double(problem.extent(Axis::group));
  for (Index i = 0; i < problem.size(out); ++i) {
    const Index item = i / (lanes * slots);
    const double before = problem.values("scores")[at(i)];
    const bool in_use = double(i % slots) < problem.value_or("lengths", item, double(slots));
    const Column column = in_use ? column_of(problem, item, i / slots % lanes, i % slots) : Column{};
    const auto sum = double(before + column.sum);
    const double rounding = arithmetic.gamma(double(column.rows) * group + 3) * sum +
                            double(column.rows) * arithmetic.flush() + store_error(out.type, sum);
    scores.values.push_back(column.rows == 0 ? before : sum);
    scores.bounds.push_back(column.rows == 0 ? 0 : rounding);
    if (wants_largest) {
      const double already = problem.values("largest")[at(i)];
      const double most = std::max(already, double(column.largest));
      largest.values.push_back(most);
      largest.bounds.push_back(column.rows == 0 ? 0
                               : std::isnan(column.sum)
                                   ? kInfinity  // a maximum may or may not see a NaN
                                   : arithmetic.gamma(group + 1) * most + arithmetic.flush() +
                                         store_error(out.type, most));
    }
  }
  std::vector<Finding> findings;
  compare(problem, "scores", results.at("scores"), scores, findings);
  if (wants_largest) {
    compare(problem, "largest", results.at("largest"), largest, findings);
  }
  return findings;
}

std::vector<bool> defined(const Problem& problem, const Tensor& output) {
  return all_defined(problem, output);
}

std::int32_t call(const hae_kernels& kernels, const Problem& problem, const Placement& placed,
                  const ContextOf& context_of) {
  hae_add_scores_arguments arguments{};
  arguments.probabilities = placed.array("probabilities");
  arguments.lengths = placed.array("lengths");
  arguments.counted = placed.array("counted");
  arguments.reduction = std::int32_t(problem.number("reduction"));
  arguments.scores = placed.array("scores");
  arguments.largest = placed.array("largest");
  return launch(kernels, HAE_ADD_SCORES, kernels.add_scores, arguments, context_of);
}

/// Heads that belong to lane h mod lanes instead of lane h / group.
std::optional<Problem> tiled(const Problem& problem) {
  const Index lanes = problem.extent(Axis::lanes);
  const Index group = problem.extent(Axis::group);
  if (lanes == 1 || group == 1) {
    return std::nullopt;
  }
  Problem altered = problem;
  std::vector<double>& to = altered.input("probabilities")->values;
  const std::vector<double>& from = problem.values("probabilities");
  const Index row = problem.extent(Axis::rows) * problem.extent(Axis::slots);
  for (Index i = 0; i < std::ssize(to); ++i) {
    const Index head = i / row % (lanes * group);
    const Index source = head % group * lanes + head / group;
    to[at(i)] = from[at(i + (source - head) * row)];
  }
  return altered;
}

/// Scores of slots in use that begin at 0.
std::optional<Problem> forgets_scores(const Problem& problem) {
  Problem altered = problem;
  const Index slots = problem.extent(Axis::slots);
  const Index of_item = problem.extent(Axis::lanes) * slots;
  std::vector<double>& scores = altered.input("scores")->values;
  for (Index i = 0; i < std::ssize(scores); ++i) {
    const bool in_use = double(i % slots) < problem.value_or("lengths", i / of_item, double(slots));
    scores[at(i)] = in_use ? 0 : scores[at(i)];
  }
  return altered;
}

/// Whether largest is what the sums have become.
bool holds_sums(const Problem& problem, const Results& results, const std::vector<Finding>& findings) {
  const auto largest = results.find("largest");
  if (largest == results.end() || findings.front().array != "largest") {
    return false;
  }
  for (Index i = 0; i < std::ssize(largest->second); ++i) {
    const double sum = results.at("scores")[at(i)];
    const double before = problem.values("largest")[at(i)];
    if (!std::isnan(sum) && largest->second[at(i)] != std::max(before, sum) &&
        largest->second[at(i)] != before) {
      return false;
    }
  }
  return true;
}

std::vector<Suspicion> suspicions() {
  std::vector<Suspicion> all{
      {"the maximum is taken of the sums, not of the rows' values", {}, holds_sums},
      {"query heads are tiled over lanes (h mod lanes) instead of interleaved (h / group)", tiled},
      {"the sum over query heads where their mean is asked for",
       [](const Problem& p) {
         return int(p.number("reduction")) == HAE_MEAN && p.extent(Axis::group) > 1
                    ? with_number(p, "reduction", HAE_SUM)
                    : std::nullopt;
       }},
      {"the scores before the call are overwritten", forgets_scores},
      {"rows that do not count are counted: padding is summed",
       [](const Problem& p) { return without_input(p, "counted"); }},
      {"subnormal probabilities are flushed to zero",
       [](const Problem& p) { return flushed(p, "probabilities"); }},
  };
  return joined({std::move(all), row_suspicions(), length_suspicions()});
}

}  // namespace

const Operation kAddScores{"add_scores", cases, [](const hae_kernels& k) { return k.add_scores != nullptr; },
                           call,         judge, defined,
                           suspicions};

}  // namespace hae::validate
