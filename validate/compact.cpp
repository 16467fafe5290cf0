#include <algorithm>
#include <cmath>
#include <limits>

#include "validate/operation.hpp"

// Compaction moves bits: every verdict is exact.

namespace hae::validate {
namespace {

struct Form {
  Type type = Type::float32;
  Index lanes = 1;
  Index slots = 1;
  Index head_dim = 8;
  enum class Keep { some, all, none, first, last, most } keep = Keep::some;
  bool lengths = false;
  bool cache = true;  ///< keys and values
  bool marks = true;  ///< positions and scores
  Type scores = Type::float32;
  Layout layout;
};

double keeps(const Form& form, Index slot, Draw& draw) {
  switch (form.keep) {
    case Form::Keep::all:
      return 1;
    case Form::Keep::none:
      return 0;
    case Form::Keep::first:
      return double(slot == 0);
    case Form::Keep::last:
      return double(slot == form.slots - 1);
    case Form::Keep::most:
      return double(draw.integer(0, 30) != 0);
    default:
      return double(draw.integer(0, 1));
  }
}

void add_array(Problem& problem, const char* name, Type type, const std::vector<Axis>& axes,
               std::vector<double> values) {
  problem.inputs.push_back(tensor(name, type, axes, std::move(values)));
  problem.outputs.push_back(tensor(name + std::string("_out"), type, axes));
}

Problem make(const Form& form, Draw& draw) {
  Problem problem;
  problem.operation = "compact";
  problem.extents = {{Axis::lanes, form.lanes}, {Axis::slots, form.slots}, {Axis::head_dim, form.head_dim}};
  problem.layout = form.layout;
  const std::vector<Axis> tokens{Axis::lanes, Axis::slots};
  const std::vector<Axis> rows{Axis::lanes, Axis::slots, Axis::head_dim};
  const Index count = form.lanes * form.slots;
  Tensor keep = tensor("keep", Type::uint8, tokens);
  for (Index i = 0; i < count; ++i) {
    keep.values.push_back(keeps(form, i % form.slots, draw));
  }
  problem.inputs.push_back(std::move(keep));
  if (form.lengths) {
    Tensor lengths = tensor("lengths", Type::int64, {Axis::lanes}, {}, Axis::slots);
    for (Index lane = 0; lane < form.lanes; ++lane) {
      lengths.values.push_back(double(draw.integer(0, form.slots)));
    }
    problem.inputs.push_back(std::move(lengths));
  }
  if (form.cache) {
    for (const char* name : {"keys", "values"}) {
      std::vector<double> values = draw.symmetric(form.type, count * form.head_dim, 100);
      for (Index i = 0; i < std::ssize(values); i += 97) {  // bits that arithmetic would not keep
        const double least = format_of(form.type).smallest_subnormal();
        const double specials[] = {-0.0, least, -least, std::numeric_limits<double>::infinity(),
                                   std::nan("")};
        values[at(i)] = specials[i / 97 % 5];
      }
      add_array(problem, name, form.type, rows, std::move(values));
    }
  }
  if (form.marks) {
    std::vector<double> positions;
    for (Index i = 0; i < count; ++i) {
      positions.push_back(double(i % form.slots * 3 + i / form.slots));
    }
    add_array(problem, "positions", Type::int64, tokens, std::move(positions));
    add_array(problem, "scores", form.scores, tokens, draw.symmetric(form.scores, count));
  }
  problem.outputs.push_back(tensor("kept", Type::int64, {Axis::lanes}));
  return problem;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  constexpr const char* kKeeps[] = {"some", "all", "none", "first", "last", "most"};
  const auto add = [&](const Form& form, const char* what) {
    all.push_back({std::string("compact/") + what + "/keep-" + kKeeps[int(form.keep)] + "/" +
                       validate::name_of(form.type) + "/slots-" + std::to_string(form.slots) + "/dim-" +
                       std::to_string(form.head_dim) + (form.layout.in_place ? "/in-place" : ""),
                   [form](Draw& draw) { return make(form, draw); }});
  };
  constexpr Type kTypes[] = {Type::float32, Type::float16, Type::bfloat16};
  constexpr Layout::Order kOrders[] = {Layout::Order::dense, Layout::Order::padded,
                                       Layout::Order::token_major};
  constexpr Index kDims[] = {8, 1, 5, 64};
  int i = 0;
  for (const Index slots : boundary_sizes()) {
    for (const bool in_place : {false, true}) {
      Form form{.type = kTypes[i % 3], .lanes = 1 + i % 3, .slots = slots};
      form.head_dim = slots > 1000 ? kDims[i % 3] : kDims[i % 4];
      form.keep = i % 4 == 3 ? Form::Keep::most : Form::Keep::some;
      form.lengths = i % 3 == 0;
      form.cache = i % 5 != 4;
      form.marks = i % 5 != 2;
      form.scores = i % 2 == 0 ? Type::float32 : Type::float64;
      form.layout = {.order = kOrders[i % 3], .misaligned = i % 4 == 1, .in_place = in_place};
      add(form, "cache");
      ++i;
    }
  }
  for (const Form::Keep keep : {Form::Keep::all, Form::Keep::none, Form::Keep::first, Form::Keep::last}) {
    for (const bool in_place : {false, true}) {
      Form form{.type = Type::bfloat16, .lanes = 2, .slots = 66, .keep = keep};
      form.layout.in_place = in_place;
      add(form, "edge");
    }
  }
  for (const Index head_dim : {128, 256}) {
    for (const bool in_place : {false, true}) {
      add({.type = Type::float16,
           .lanes = 5,
           .slots = 40,
           .head_dim = head_dim,
           .lengths = true,
           .layout = {.in_place = in_place}},
          "wide");
    }
  }
  add({.lanes = 0, .slots = 33}, "empty-batch");
  add({.lanes = 65537, .slots = 2, .head_dim = 1}, "65537-lanes");
  for (const bool in_place : {false, true}) {
    add({.type = Type::float16, .lanes = 2, .slots = 33, .layout = {.in_place = in_place, .far = true}},
        "far");
  }
  return all;
}

bool stays(const Problem& problem, Index lane, Index slot) {
  const Index slots = problem.extent(Axis::slots);
  return double(slot) < problem.value_or("lengths", lane, double(slots)) &&
         problem.values("keep")[at(lane * slots + slot)] != 0;
}

Index kept_of(const Problem& problem, Index lane) {
  Index kept = 0;
  for (Index slot = 0; slot < problem.extent(Axis::slots); ++slot) {
    kept += stays(problem, lane, slot);
  }
  return kept;
}

/// What one array becomes; undefined beyond kept.
Expected moved(const Problem& problem, const Tensor& from) {
  const Index slots = problem.extent(Axis::slots);
  const Index width = from.axes.size() == 3 ? problem.extent(Axis::head_dim) : 1;
  Expected expected{from.values,
                    std::vector<double>(from.values.size(), std::numeric_limits<double>::infinity()), true};
  for (Index lane = 0; lane < problem.extent(Axis::lanes); ++lane) {
    Index to = lane * slots;
    for (Index slot = 0; slot < slots; ++slot) {
      if (stays(problem, lane, slot)) {
        for (Index i = 0; i < width; ++i) {
          expected.values[at(to * width + i)] = from.values[at((lane * slots + slot) * width + i)];
          expected.bounds[at(to * width + i)] = 0;
        }
        ++to;
      }
    }
  }
  return expected;
}

std::vector<Finding> judge(const Problem& problem, const Results& results, const Arithmetic&) {
  std::vector<Finding> findings;
  Expected kept;
  for (Index lane = 0; lane < problem.extent(Axis::lanes); ++lane) {
    kept.values.push_back(double(kept_of(problem, lane)));
    kept.bounds.push_back(0);
  }
  compare(problem, "kept", results.at("kept"), kept, findings);
  for (const char* name : {"keys", "values", "positions", "scores"}) {
    const std::string out = name + std::string("_out");
    if (problem.output(out) != nullptr) {
      compare(problem, out, results.at(out), moved(problem, *problem.input(name)), findings);
    }
  }
  return findings;
}

std::vector<bool> defined(const Problem& problem, const Tensor& output) {
  std::vector<bool> defined(at(problem.size(output)), output.name == "kept");
  const Index slots = problem.extent(Axis::slots);
  const Index width = output.axes.size() == 3 ? problem.extent(Axis::head_dim) : 1;
  for (Index lane = 0; output.name != "kept" && lane < problem.extent(Axis::lanes); ++lane) {
    std::fill_n(defined.begin() + lane * slots * width, kept_of(problem, lane) * width, true);
  }
  return defined;
}

std::int32_t call(const hae_kernels& kernels, const Problem&, const Placement& placed,
                  const ContextOf& context_of) {
  hae_compact_arguments arguments{};
  arguments.keep = placed.array("keep");
  arguments.lengths = placed.array("lengths");
  arguments.keys = placed.array("keys");
  arguments.values = placed.array("values");
  arguments.positions = placed.array("positions");
  arguments.scores = placed.array("scores");
  arguments.keys_out = placed.array("keys_out");
  arguments.values_out = placed.array("values_out");
  arguments.positions_out = placed.array("positions_out");
  arguments.scores_out = placed.array("scores_out");
  arguments.kept = placed.array("kept");
  return launch(kernels, HAE_COMPACT, kernels.compact, arguments, context_of);
}

/// The problem in which one array holds something else.
Suspicion array_holds(std::string fault, const char* name,
                      std::function<double(const Problem&, Index)> value) {
  return {std::move(fault), [name, value](const Problem& problem) -> std::optional<Problem> {
            if (problem.input(name) == nullptr) {
              return std::nullopt;
            }
            Problem altered = problem;
            std::vector<double>& values = altered.input(name)->values;
            for (Index i = 0; i < std::ssize(values); ++i) {
              values[at(i)] = value(problem, i);
            }
            return altered;
          }};
}

/// Positions that become slot numbers after the move: a problem whose kept tokens stand there already.
std::optional<Problem> renumbered(const Problem& problem) {
  if (problem.input("positions") == nullptr) {
    return std::nullopt;
  }
  Problem altered = problem;
  std::vector<double>& positions = altered.input("positions")->values;
  const Index slots = problem.extent(Axis::slots);
  for (Index lane = 0; lane < problem.extent(Axis::lanes); ++lane) {
    Index kept = 0;
    for (Index slot = 0; slot < slots; ++slot) {
      positions[at(lane * slots + slot)] = double(kept);
      kept += stays(problem, lane, slot);
    }
  }
  return altered;
}

std::vector<Suspicion> suspicions() {
  std::vector<Suspicion> all{
      {"positions become row numbers: after an eviction they are no longer positions", renumbered},
      {"the evicted are kept and the kept evicted: the mask is inverted",
       [](const Problem& p) {
         return with_values(p, "keep", [](double keep) { return keep == 0 ? 1.0 : 0.0; });
       }},
      array_holds(
          "values are moved from the keys", "values",
          [](const Problem& p, Index i) { return p.input("keys") == nullptr ? 0 : p.values("keys")[at(i)]; }),
      {"subnormal numbers are flushed to zero on the way",
       [](const Problem& p) -> std::optional<Problem> {
         std::optional<Problem> altered = p;
         for (const char* name : {"keys", "values"}) {
           if (altered && p.input(name) != nullptr) {
             const double least = format_of(p.input(name)->type).smallest_normal();
             altered =
                 with_values(*altered, name, [least](double x) { return std::fabs(x) < least ? 0.0 : x; });
           }
         }
         return altered;
       }},
      {"scores stay where they are while their tokens move",
       [](const Problem& p) -> std::optional<Problem> {
         if (p.input("scores") == nullptr) {
           return std::nullopt;
         }
         Problem altered = p;
         const Index slots = p.extent(Axis::slots);
         for (Index lane = 0; lane < p.extent(Axis::lanes); ++lane) {
           Index kept = 0;
           for (Index slot = 0; slot < slots; ++slot) {
             if (stays(p, lane, slot)) {
               altered.input("scores")->values[at(lane * slots + slot)] =
                   p.values("scores")[at(lane * slots + kept++)];
             }
           }
         }
         return altered;
       }},
  };
  return joined({std::move(all), length_suspicions()});
}

}  // namespace

const Operation kCompact{"compact", cases, [](const hae_kernels& k) { return k.compact != nullptr; },
                         call,      judge, defined,
                         suspicions};

}  // namespace hae::validate
