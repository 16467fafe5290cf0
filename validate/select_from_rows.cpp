#include <algorithm>
#include <cmath>

#include "validate/selection.hpp"

// Selection straight from rows of attention. The scores are the kernel's own, so two of them that are closer
// than what their sums may lose may change places.

namespace hae::validate {
namespace {

struct Form {
  Type type = Type::float32;
  Index lanes = 1;
  Index group = 1;
  Index rows = 1;
  Index slots = 1;
  Index most = 1;
  bool lengths = false;
  bool scores_out = false;
  bool near_ties = false;  ///< scores that differ by less than their sums lose
  Layout layout;
};

Problem make(const Form& form, Draw& draw) {
  Problem problem;
  problem.operation = "select_from_rows";
  problem.extents = {{Axis::lanes, form.lanes},
                     {Axis::group, form.group},
                     {Axis::rows, form.rows},
                     {Axis::slots, form.slots},
                     {Axis::most, form.most}};
  problem.layout = form.layout;
  std::vector<double> lengths;
  std::vector<double> counts;
  for (Index lane = 0; lane < form.lanes; ++lane) {
    lengths.push_back(double(form.lengths ? draw.integer(form.slots / 2, form.slots) : form.slots));
    counts.push_back(double(lane == 0 ? form.most : draw.integer(0, form.most)));
  }
  Tensor rows = tensor("probabilities", form.type, {Axis::lanes, Axis::group, Axis::rows, Axis::slots});
  const double mean = 1 / double(std::max(form.slots, Index{1}));
  for (Index i = 0; i < form.lanes * form.group * form.rows * form.slots; ++i) {
    const double u = draw.unit();
    const double p =
        form.near_ties ? mean * (1 + 0x1p-23 * double(draw.integer(0, 2))) : 4 * u * u * u * mean;
    const bool padding = double(i % form.slots) >= lengths[at(i / (form.group * form.rows * form.slots))];
    rows.values.push_back(padding ? std::nan("") : rounded(form.type, p));
  }
  problem.inputs.push_back(std::move(rows));
  if (form.lengths) {
    problem.inputs.push_back(tensor("lengths", Type::int64, {Axis::lanes}, lengths, Axis::slots));
  }
  problem.inputs.push_back(tensor("counts", Type::int64, {Axis::lanes}, counts, Axis::most));
  problem.outputs.push_back(tensor("chosen", Type::int64, {Axis::lanes, Axis::most}));
  if (form.scores_out) {
    problem.outputs.push_back(tensor("chosen_scores", Type::float32, {Axis::lanes, Axis::most}));
  }
  return problem;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const Form& form, const char* what) {
    all.push_back({std::string("select_from_rows/") + what + "/" + validate::name_of(form.type) + "/slots-" +
                       std::to_string(form.slots) + "/rows-" + std::to_string(form.rows) + "/most-" +
                       std::to_string(form.most),
                   [form](Draw& draw) { return make(form, draw); }});
  };
  constexpr Type kTypes[] = {Type::float32, Type::float16, Type::bfloat16};
  int i = 0;
  for (const Index slots : boundary_sizes()) {
    for (const Type type : kTypes) {
      Form form{.type = type, .lanes = 1 + i % 3, .group = 1 + i % 2 * 3, .rows = 1 + i % 7, .slots = slots};
      form.most = std::max(slots / 4, Index{1});
      form.lengths = i % 2 == 0;
      form.scores_out = i % 3 != 0;
      form.layout = {.order = i % 4 == 0 ? Layout::Order::padded : Layout::Order::dense,
                     .misaligned = i % 5 == 0};
      add(form, "rows");
      ++i;
    }
  }
  add({.group = 4, .rows = 16, .slots = 257, .most = 100, .near_ties = true}, "near-ties");
  add({.lanes = 9, .group = 7, .rows = 3, .slots = 70, .most = 12, .lengths = true}, "many-lanes");
  add({.lanes = 0, .rows = 2, .slots = 33, .most = 3}, "empty-batch");
  add({.type = Type::float16, .lanes = 2, .rows = 3, .slots = 65, .most = 9, .layout = {.far = true}}, "far");
  return all;
}

/// docs/validate.md, "Selection from rows".
std::vector<Lane> lanes_of(const Problem& problem, const Arithmetic& arithmetic) {
  const Index slots = problem.extent(Axis::slots);
  const Index rows = problem.extent(Axis::group) * problem.extent(Axis::rows);
  const std::vector<double>& probabilities = problem.values("probabilities");
  std::vector<Lane> lanes(at(problem.extent(Axis::lanes)));
  for (Index l = 0; l < std::ssize(lanes); ++l) {
    Lane& lane = lanes[at(l)];
    lane.count = Index(problem.values("counts")[at(l)]);
    const double length = problem.value_or("lengths", l, double(slots));
    for (Index slot = 0; slot < slots; ++slot) {
      long double sum = 0;
      for (Index row = 0; row < rows; ++row) {
        sum += probabilities[at((l * rows + row) * slots + slot)];
      }
      const auto score = double(sum / problem.extent(Axis::group));
      lane.scores.push_back(score);
      lane.bounds.push_back(arithmetic.gamma(double(rows) + 2) * score +
                            double(problem.extent(Axis::rows)) * arithmetic.flush() +
                            store_error(Type::float32, score));
      lane.positions.push_back(double(slot));
      lane.eligible.push_back(double(slot) < length);
    }
  }
  return lanes;
}

std::vector<Finding> judge(const Problem& problem, const Results& results, const Arithmetic& arithmetic) {
  std::vector<Finding> findings;
  const auto scores = results.find("chosen_scores");
  judge_choices(problem, lanes_of(problem, arithmetic), results.at("chosen"),
                scores == results.end() ? nullptr : &scores->second, true, findings);
  return findings;
}

std::vector<bool> defined(const Problem& problem, const Tensor& output) {
  std::vector<bool> defined(at(problem.size(output)), output.name == "chosen");
  const Index slots = problem.extent(Axis::slots);
  for (Index i = 0; i < std::ssize(defined); ++i) {
    const Index lane = i / problem.extent(Axis::most);
    const double chosen =
        std::min(problem.values("counts")[at(lane)], problem.value_or("lengths", lane, double(slots)));
    defined[at(i)] = defined[at(i)] || double(i % problem.extent(Axis::most)) < chosen;
  }
  return defined;
}

std::int32_t call(const hae_kernels& kernels, const Problem&, const Placement& placed,
                  const ContextOf& context_of) {
  hae_select_from_rows_arguments arguments{};
  arguments.probabilities = placed.array("probabilities");
  arguments.lengths = placed.array("lengths");
  arguments.counts = placed.array("counts");
  arguments.chosen = placed.array("chosen");
  arguments.chosen_scores = placed.array("chosen_scores");
  return launch(kernels, HAE_SELECT_FROM_ROWS, kernels.select_from_rows, arguments, context_of);
}

std::vector<Suspicion> suspicions() {
  std::vector<Suspicion> all{
      {"the highest scores are chosen, not the lowest",
       [](const Problem& p) { return with_values(p, "probabilities", [](double x) { return -x; }); }},
  };
  const auto lanes = [](const Problem& p) { return lanes_of(p, Arithmetic(format_of(Type::float32))); };
  return joined({std::move(all), row_suspicions(), choice_suspicions(lanes), length_suspicions()});
}

}  // namespace

const Operation kSelectFromRows{"select_from_rows",
                                cases,
                                [](const hae_kernels& k) { return k.select_from_rows != nullptr; },
                                call,
                                judge,
                                defined,
                                suspicions};

}  // namespace hae::validate
