#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "validate/selection.hpp"

// The lowest k of each lane by the one total order of evictions. Scores are given, so nothing is excused.

namespace hae::validate {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

enum class Values { distinct, ties, equal, zeros, subnormal, nan, all_nan, infinite, negative };

struct Form {
  Type type = Type::float32;
  Values values = Values::distinct;
  Index lanes = 1;
  Index slots = 1;
  Index most = 1;
  bool positions = false;
  bool eligible = false;
  bool lengths = false;
  bool ordered = true;
  bool scores_out = false;
  Layout layout;
};

double score(const Form& form, Draw& draw, Index rank) {
  const double least = format_of(form.type).smallest_subnormal();
  switch (form.values) {
    case Values::ties:
      return double(draw.integer(0, 3));
    case Values::equal:
      return 0.25;
    case Values::zeros:
      return draw.integer(0, 3) == 0 ? 1.0 : draw.integer(0, 1) == 0 ? 0.0 : -0.0;
    case Values::subnormal:
      return least * double(draw.integer(0, 40));
    case Values::nan:
      return draw.integer(0, 5) == 0 ? std::copysign(std::nan(""), draw.integer(0, 1) == 0 ? 1.0 : -1.0)
                                     : draw.unit();
    case Values::all_nan:
      return std::nan("");
    case Values::infinite:
      return draw.integer(0, 2) == 0 ? kInfinity : draw.integer(0, 2) == 0 ? -kInfinity : draw.unit();
    case Values::negative:
      return 2 * draw.unit() - 1;
    default:
      return 0.5 + double(rank) * 0x1p-20;  // neighbours in float32 are told apart; narrower types tie
  }
}

const char* name_of(Values values) {
  constexpr const char* kNames[] = {"distinct", "ties",    "all-equal", "signed-zeros", "subnormal",
                                    "nan",      "all-nan", "infinite",  "negative"};
  return kNames[int(values)];
}

std::vector<double> scores_of(const Form& form, Draw& draw, const std::vector<double>& lengths) {
  std::vector<double> scores;
  for (Index lane = 0; lane < form.lanes; ++lane) {
    const std::vector<Index> ranks = draw.permutation(form.slots);
    for (Index slot = 0; slot < form.slots; ++slot) {
      const double value = rounded(form.type, score(form, draw, ranks[at(slot)]));
      scores.push_back(double(slot) < lengths[at(lane)] ? value : std::nan(""));
    }
  }
  return scores;
}

Problem make(const Form& form, Draw& draw) {
  Problem problem;
  problem.operation = "select_lowest";
  problem.extents = {{Axis::lanes, form.lanes}, {Axis::slots, form.slots}, {Axis::most, form.most}};
  problem.numbers["ordered"] = form.ordered;
  problem.layout = form.layout;
  std::vector<double> lengths;
  std::vector<double> counts;
  for (Index lane = 0; lane < form.lanes; ++lane) {
    lengths.push_back(double(form.lengths ? draw.integer(form.slots / 2, form.slots) : form.slots));
    counts.push_back(double(lane == 0 ? form.most : draw.integer(0, form.most)));
  }
  problem.inputs.push_back(
      tensor("scores", form.type, {Axis::lanes, Axis::slots}, scores_of(form, draw, lengths)));
  if (form.positions) {  // a ring buffer: the newest tokens stand where the oldest stood
    Tensor positions = tensor("positions", Type::int64, {Axis::lanes, Axis::slots});
    for (Index lane = 0; lane < form.lanes; ++lane) {
      const Index start = draw.integer(1, std::max(form.slots, Index{1}));
      for (Index slot = 0; slot < form.slots; ++slot) {
        positions.values.push_back(double(100 + 2 * ((slot + start) % form.slots)));
      }
    }
    problem.inputs.push_back(std::move(positions));
  }
  if (form.eligible) {
    Tensor eligible = tensor("eligible", Type::uint8, {Axis::lanes, Axis::slots});
    for (Index i = 0; i < form.lanes * form.slots; ++i) {
      eligible.values.push_back(double(draw.integer(0, 3) != 0));
    }
    problem.inputs.push_back(std::move(eligible));
  }
  if (form.lengths) {
    problem.inputs.push_back(tensor("lengths", Type::int64, {Axis::lanes}, lengths, Axis::slots));
  }
  problem.inputs.push_back(tensor("counts", Type::int64, {Axis::lanes}, counts, Axis::most));
  problem.outputs.push_back(tensor("chosen", Type::int64, {Axis::lanes, Axis::most}));
  if (form.scores_out) {
    problem.outputs.push_back(tensor("chosen_scores", form.type, {Axis::lanes, Axis::most}));
  }
  return problem;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const Form& form, const char* what) {
    all.push_back({std::string("select_lowest/") + what + "/" + name_of(form.values) + "/" +
                       validate::name_of(form.type) + "/slots-" + std::to_string(form.slots) + "/most-" +
                       std::to_string(form.most),
                   [form](Draw& draw) { return make(form, draw); }});
  };
  constexpr Type kTypes[] = {Type::float32, Type::float16, Type::bfloat16, Type::float64};
  constexpr Layout::Order kOrders[] = {Layout::Order::dense, Layout::Order::padded};
  int i = 0;
  for (const Index slots : boundary_sizes()) {
    for (const Values values : {Values::distinct, Values::ties, Values::equal}) {
      Form form{.type = kTypes[i % 4], .values = values, .slots = slots, .most = 1, .scores_out = i % 2 == 0};
      add(form, "one");
      form.lanes = slots > 2000 ? 2 : 3;
      form.most = std::max(slots / 3, Index{1}) + i % 3;
      form.positions = i % 3 == 0;
      form.eligible = i % 2 == 0;
      form.lengths = i % 4 < 2;
      form.ordered = i % 5 != 0;
      form.layout = {.order = kOrders[i % 2], .misaligned = i % 3 == 1};
      add(form, "many");
      ++i;
    }
  }
  for (const Values values :
       {Values::zeros, Values::subnormal, Values::nan, Values::all_nan, Values::infinite, Values::negative}) {
    for (const Type type : kTypes) {
      add({.type = type, .values = values, .lanes = 2, .slots = 40, .most = 11, .scores_out = true},
          "special");
    }
    add({.values = values, .lanes = 2, .slots = 300, .most = 70, .positions = true, .eligible = true},
        "special");
  }
  add({.values = Values::ties, .slots = 5, .most = 9}, "more-than-there-are");
  add({.values = Values::ties, .slots = 33, .most = 0}, "none");
  add({.values = Values::ties, .lanes = 9, .slots = 70, .most = 12, .lengths = true}, "many-lanes");
  add({.lanes = 0, .slots = 33, .most = 3}, "empty-batch");
  add({.values = Values::ties, .lanes = 65537, .slots = 2}, "65537-lanes");
  add({.values = Values::distinct, .lanes = 2, .slots = 65, .most = 9, .layout = {.far = true}}, "far");
  return all;
}

std::vector<Lane> lanes_of(const Problem& problem) {
  const Index slots = problem.extent(Axis::slots);
  std::vector<Lane> lanes(at(problem.extent(Axis::lanes)));
  for (Index l = 0; l < std::ssize(lanes); ++l) {
    Lane& lane = lanes[at(l)];
    lane.count = Index(problem.values("counts")[at(l)]);
    lane.bounds.assign(at(slots), 0);
    const double length = problem.value_or("lengths", l, double(slots));
    for (Index slot = 0; slot < slots; ++slot) {
      lane.scores.push_back(problem.values("scores")[at(l * slots + slot)]);
      lane.positions.push_back(problem.value_or("positions", l * slots + slot, double(slot)));
      lane.eligible.push_back(double(slot) < length &&
                              problem.value_or("eligible", l * slots + slot, 1) != 0);
    }
  }
  return lanes;
}

std::vector<Finding> judge(const Problem& problem, const Results& results, const Arithmetic&) {
  std::vector<Finding> findings;
  const auto scores = results.find("chosen_scores");
  judge_choices(problem, lanes_of(problem), results.at("chosen"),
                scores == results.end() ? nullptr : &scores->second, problem.flag("ordered"), findings);
  return findings;
}

/// What is chosen; where the order is free, the bytes may change from call to call.
std::vector<bool> defined(const Problem& problem, const Tensor& output) {
  std::vector<bool> defined(at(problem.size(output)), output.name == "chosen" && problem.flag("ordered"));
  if (!problem.flag("ordered") || output.name == "chosen") {
    return defined;
  }
  const std::vector<Lane> lanes = lanes_of(problem);
  for (Index l = 0; l < std::ssize(lanes); ++l) {
    const auto chosen = std::ssize(lowest(lanes[at(l)]));
    std::fill_n(defined.begin() + l * problem.extent(Axis::most), chosen, true);
  }
  return defined;
}

std::int32_t call(const hae_kernels& kernels, const Problem& problem, const Placement& placed,
                  const ContextOf& context_of) {
  hae_select_lowest_arguments arguments{};
  arguments.scores = placed.array("scores");
  arguments.positions = placed.array("positions");
  arguments.eligible = placed.array("eligible");
  arguments.lengths = placed.array("lengths");
  arguments.counts = placed.array("counts");
  arguments.ordered = std::int32_t(problem.number("ordered"));
  arguments.chosen = placed.array("chosen");
  arguments.chosen_scores = placed.array("chosen_scores");
  return launch(kernels, HAE_SELECT_LOWEST, kernels.select_lowest, arguments, context_of);
}

/// Positions whose order is that of `key`, ascending.
template <typename Key>
std::optional<Problem> positions_by(const Problem& problem, const Key& key) {
  Problem altered = problem;
  const Index slots = problem.extent(Axis::slots);
  if (altered.input("positions") == nullptr) {
    altered.inputs.push_back(tensor("positions", Type::int64, {Axis::lanes, Axis::slots}));
  }
  std::vector<double>& positions = altered.input("positions")->values;
  positions.resize(at(problem.extent(Axis::lanes) * slots));
  for (Index i = 0; i < std::ssize(positions); ++i) {
    positions[at(i)] = key(problem.value_or("positions", i, double(i % slots)), i % slots);
  }
  return altered;
}

std::vector<Suspicion> suspicions() {
  std::vector<Suspicion> all{
      {"among equal scores the highest position goes first",
       [](const Problem& p) { return positions_by(p, [](double position, Index) { return -position; }); }},
      {"slot numbers stand for positions when scores are equal",
       [](const Problem& p) { return without_input(p, "positions"); }},
      {"the highest scores are chosen, not the lowest",
       [](const Problem& p) { return with_values(p, "scores", [](double x) { return -x; }); }},
      {"a NaN ranks above everything instead of below",
       [](const Problem& p) {
         return with_values(p, "scores", [](double x) { return std::isnan(x) ? kInfinity : x; });
       }},
      {"-0 ranks below +0",
       [](const Problem& p) {
         const double least = -format_of(p.input("scores")->type).smallest_subnormal();
         return with_values(p, "scores", [least](double x) { return x == 0 && std::signbit(x) ? least : x; });
       }},
      {"subnormal scores are flushed to zero", [](const Problem& p) { return flushed(p, "scores"); }},
      {"scores are compared by magnitude: the sign is lost",
       [](const Problem& p) { return with_values(p, "scores", [](double x) { return std::fabs(x); }); }},
      {"scores are compared in a narrower type",
       [](const Problem& p) {
         return with_values(p, "scores", [](double x) { return rounded(Type::float16, x); });
       }},
      {"protected tokens are chosen: `eligible` is ignored",
       [](const Problem& p) { return without_input(p, "eligible"); }},
      {"lane 0's count is used for every lane",
       [](const Problem& p) -> std::optional<Problem> {
         const std::vector<double>& counts = p.values("counts");
         const double first = counts.empty() ? 0 : counts.front();
         return with_values(p, "counts", [first](double) { return first; });
       }},
  };
  return joined({std::move(all), choice_suspicions(lanes_of), length_suspicions()});
}

}  // namespace

const Operation kSelectLowest{
    "select_lowest", cases,     [](const hae_kernels& k) { return k.select_lowest != nullptr; }, call, judge,
    defined,         suspicions};

}  // namespace hae::validate
