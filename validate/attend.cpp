#include <algorithm>
#include <cmath>
#include <limits>

#include "validate/operation.hpp"

// Decode attention that returns its probabilities, or what kernels return in their place.

namespace hae::validate {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// An online softmax rescales its sums when a tile brings a new maximum; a tile has at least so many keys.
constexpr Index kTile = 16;

// ---- cases

enum class Values { ordinary, huge, low, equal, peaked, subnormal, nan };

struct Form {
  Type type = Type::float32;
  Values values = Values::ordinary;
  Index items = 1;
  Index lanes = 1;
  Index group = 1;
  Index slots = 1;
  Index head_dim = 16;
  bool lengths = false;
  bool visible = false;
  Index window = 0;
  double scale = 0;  ///< 0: 1 / sqrt(head_dim)
  double peak =
      0.5;  ///< of peaked and subnormal weights: where the one large key is, as a share of the slots
  bool asks_probabilities = true;
  bool asks_output = true;
  bool asks_log_sum_exp = false;
  bool asks_sums = false;
  Layout layout;
};

const char* name_of(Values values) {
  constexpr const char* kNames[] = {"ordinary", "huge-logits",       "low-logits", "all-equal",
                                    "peaked",   "subnormal-weights", "nan"};
  return kNames[int(values)];
}

void add_queries_and_keys(Problem& problem, const Form& form, Draw& draw) {
  const Index vectors = form.items * form.lanes;
  std::vector<double> queries = draw.symmetric(form.type, vectors * form.group * form.head_dim, 2);
  std::vector<double> keys = draw.symmetric(form.type, vectors * form.slots * form.head_dim, 2);
  for (Index i = 0; i < std::ssize(keys); ++i) {
    const Index slot = i / form.head_dim % std::max(form.slots, Index{1});
    const Index lane = i / form.head_dim / std::max(form.slots, Index{1}) % form.lanes;
    double& key = keys[at(i)];
    if (form.values == Values::equal) {
      key = 0.5;
    } else if (form.values == Values::huge) {
      key = rounded(form.type, 200 * key);
    } else if (form.values == Values::low) {  // every logit is about -150: exp of it is 0 in float32
      key = i % form.head_dim == 0 ? -150 : rounded(form.type, key / 64);
    } else if (form.values == Values::peaked || form.values == Values::subnormal) {
      // The weight of all but one slot is exp(-c): small, or below the smallest normal float32.
      const double c = form.values == Values::peaked ? 12 : 90;
      const auto peak = Index(form.peak * double(form.slots));
      key = i % form.head_dim == 0 ? (slot == peak ? c : 0) : rounded(form.type, key / 64);
    } else if (form.values == Values::nan && lane == 0 && draw.integer(0, 60) == 0) {
      key = std::nan("");
    }
  }
  if (form.values == Values::peaked || form.values == Values::subnormal || form.values == Values::low) {
    for (Index i = 0; i < std::ssize(queries); i += form.head_dim) {
      queries[at(i)] = rounded(form.type, 1 / problem.number("scale"));
    }
  }
  problem.inputs.push_back(tensor(
      "queries", form.type, {Axis::items, Axis::lanes, Axis::group, Axis::head_dim}, std::move(queries)));
  problem.inputs.push_back(
      tensor("keys", form.type, {Axis::items, Axis::lanes, Axis::slots, Axis::head_dim}, std::move(keys)));
}

void add_masks(Problem& problem, const Form& form, Draw& draw) {
  const Index vectors = form.items * form.lanes;
  const std::vector<Axis> axes{Axis::items, Axis::lanes, Axis::slots};
  if (form.lengths) {
    Tensor lengths = tensor("lengths", Type::int64, {Axis::items, Axis::lanes}, {}, Axis::slots);
    for (Index i = 0; i < vectors; ++i) {
      lengths.values.push_back(double(i % 4 == 3 ? 0 : draw.integer(form.slots / 2, form.slots)));
    }
    problem.inputs.push_back(std::move(lengths));
  }
  if (form.visible) {
    Tensor visible = tensor("visible", Type::uint8, axes);
    for (Index i = 0; i < vectors * form.slots; ++i) {
      const bool is_masked_row = i / std::max(form.slots, Index{1}) % 3 == 2;
      visible.values.push_back(double(!is_masked_row && draw.integer(0, 3) != 0));
    }
    problem.inputs.push_back(std::move(visible));
  }
  if (form.window > 0) {  // after evictions positions have gaps
    Tensor positions = tensor("positions", Type::int64, axes);
    for (Index i = 0; i < vectors * form.slots; ++i) {
      positions.values.push_back(double(3 * (i % form.slots) + i / form.slots % 2));
    }
    problem.inputs.push_back(std::move(positions));
    Tensor query_positions = tensor("query_positions", Type::int64, {Axis::items});
    for (Index item = 0; item < form.items; ++item) {
      query_positions.values.push_back(double(3 * form.slots + 5 * item));
    }
    problem.inputs.push_back(std::move(query_positions));
  }
}

/// What lies beyond the lengths: NaN.
void poison_padding(Problem& problem, const Form& form) {
  if (!form.lengths) {
    return;
  }
  for (const char* name : {"keys", "values"}) {
    std::vector<double>& values = problem.input(name)->values;
    for (Index i = 0; i < std::ssize(values); ++i) {
      const Index row = i / form.head_dim;
      if (double(row % form.slots) >= problem.values("lengths")[at(row / form.slots)]) {
        values[at(i)] = std::nan("");
      }
    }
  }
}

Problem make(const Form& form, Draw& draw) {
  Problem problem;
  problem.operation = "attend";
  problem.extents = {{Axis::items, form.items},
                     {Axis::lanes, form.lanes},
                     {Axis::group, form.group},
                     {Axis::slots, form.slots},
                     {Axis::head_dim, form.head_dim}};
  problem.numbers["scale"] = float(form.scale > 0 ? form.scale : 1 / std::sqrt(double(form.head_dim)));
  problem.numbers["window"] = double(form.window);
  problem.layout = form.layout;
  add_queries_and_keys(problem, form, draw);
  problem.inputs.push_back(
      tensor("values", form.type, {Axis::items, Axis::lanes, Axis::slots, Axis::head_dim},
             draw.symmetric(form.type, form.items * form.lanes * form.slots * form.head_dim)));
  add_masks(problem, form, draw);
  poison_padding(problem, form);
  const std::vector<Axis> row{Axis::items, Axis::lanes, Axis::group};
  const auto ask = [&](bool asked, const char* name, Type type, std::vector<Axis> axes) {
    if (asked) {
      problem.outputs.push_back(tensor(name, type, std::move(axes)));
    }
  };
  ask(form.asks_probabilities, "probabilities", form.asks_sums ? Type::float32 : form.type,
      {Axis::items, Axis::lanes, Axis::group, Axis::slots});
  ask(form.asks_output, "output", form.type, {Axis::items, Axis::lanes, Axis::group, Axis::head_dim});
  ask(form.asks_log_sum_exp, "log_sum_exp", Type::float32, row);
  ask(form.asks_sums, "sums", Type::float32, {Axis::items, Axis::lanes, Axis::slots});
  return problem;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const Form& form, const char* what) {
    all.push_back({std::string("attend/") + what + "/" + name_of(form.values) + "/" +
                       validate::name_of(form.type) + "/slots-" + std::to_string(form.slots) + "/heads-" +
                       std::to_string(form.lanes) + "x" + std::to_string(form.group) + "/dim-" +
                       std::to_string(form.head_dim),
                   [form](Draw& draw) { return make(form, draw); }});
  };
  constexpr Type kTypes[] = {Type::float32, Type::float16, Type::bfloat16};
  constexpr Layout::Order kOrders[] = {Layout::Order::dense, Layout::Order::padded,
                                       Layout::Order::token_major};
  constexpr Index kDims[] = {16, 64, 5, 128, 1, 80};
  constexpr Index kPages[] = {16, 1, 64};
  int i = 0;
  for (const Index slots : boundary_sizes()) {
    const bool is_large = slots > 1000;
    for (const Type type : kTypes) {
      Form form{.type = type, .slots = slots, .head_dim = is_large ? 16 : kDims[i % 6]};
      add(form, "plain");
      form.lanes = 1 + i % 2;
      form.group = is_large ? 2 : 1 + i % 4;
      form.items = is_large ? 1 : 2;
      form.lengths = true;
      form.visible = i % 4 == 1;
      form.window = i % 4 == 2 ? std::max(slots, Index{1}) : 0;
      form.layout = {.order = kOrders[i % 3], .misaligned = i % 2 == 0};
      form.asks_probabilities = i % 3 != 2;
      form.asks_log_sum_exp = i % 3 == 2;
      form.asks_sums = i % 3 != 0;
      add(form, "lengths");
      if (i % 2 == 1) {
        form.lanes = 2;
        form.layout = {.order = kOrders[i / 2 % 3], .page_size = kPages[i / 2 % 3]};
        add(form, "paged");
      }
      ++i;
    }
  }
  for (const Type type : kTypes) {
    for (const Values values :
         {Values::huge, Values::low, Values::equal, Values::peaked, Values::subnormal, Values::nan}) {
      add({.type = type, .values = values, .lanes = 2, .group = 2, .slots = 67, .asks_log_sum_exp = true},
          "special");
      add({.type = type,
           .values = values,
           .lanes = 2,
           .group = 3,
           .slots = 300,
           .head_dim = 8,
           .lengths = true,
           .asks_log_sum_exp = true,
           .asks_sums = true,
           .layout = {.page_size = 16}},
          "special-paged");
    }
    add({.type = type, .values = Values::equal, .slots = 4096, .head_dim = 4, .asks_log_sum_exp = true},
        "special");
    add({.type = type,
         .lanes = 3,
         .group = 2,
         .slots = 40,
         .visible = true,
         .asks_log_sum_exp = true,
         .asks_sums = true},
        "masked-rows");
  }
  // More of everything than a kernel's tables may have been made for.
  add({.items = 3,
       .lanes = 4,
       .group = 8,
       .slots = 33,
       .head_dim = 32,
       .lengths = true,
       .window = 20,
       .scale = 0.3,
       .asks_log_sum_exp = true,
       .asks_sums = true},
      "wide");
  add({.items = 5,
       .lanes = 9,
       .group = 7,
       .slots = 33,
       .head_dim = 8,
       .lengths = true,
       .scale = 0.7,
       .asks_sums = true},
      "wide");
  for (const Index head_dim : {192, 256}) {
    add({.type = Type::bfloat16, .lanes = 2, .group = 2, .slots = 65, .head_dim = head_dim}, "wide");
    add({.items = 2,
         .lanes = 2,
         .slots = 65,
         .head_dim = head_dim,
         .lengths = true,
         .scale = 0.05,
         .layout = {.page_size = 16}},
        "wide-paged");
  }
  // The one key that matters at the ends of tiles: what leaves it out cannot hide in the bound.
  int number = 0;
  for (const Index slot : {0, 1023, 1024, 4095, 4096}) {
    const std::string what = "peak-at-" + std::to_string(slot);
    add({.type = kTypes[++number % 3],
         .values = Values::peaked,
         .slots = 4097,
         .head_dim = 4,
         .peak = (double(slot) + 0.5) / 4097,
         .asks_log_sum_exp = true},
        what.c_str());
  }
  add({.items = 0, .slots = 33}, "empty-batch");
  add({.items = 65537, .slots = 2, .head_dim = 1}, "65537-items");
  for (const Type type : {Type::float32, Type::float16}) {
    add({.type = type, .items = 2, .lanes = 2, .group = 2, .slots = 33, .layout = {.far = true}}, "far");
    add({.type = type,
         .items = 2,
         .lanes = 2,
         .slots = 33,
         .lengths = true,
         .layout = {.page_size = 16, .far = true}},
        "far-paged");
  }
  return all;
}

// ---- reference

/// One row of attention: what is exact of it, and how much each weight may be off.
struct Row {
  std::vector<bool> takes_part;          ///< [slots]
  std::vector<long double> probability;  ///< [slots]
  std::vector<double> logit_error;       ///< [slots] e^Delta_j - 1: docs/validate.md, "Attention"
  double mean_error = 0;                 ///< sum of a_j times that
  long double log_sum_exp = -std::numeric_limits<long double>::infinity();
  double log_magnitude = 0;  ///< |max z| + |ln sum|
  Index keys = 0;            ///< that take part
  bool is_nan = false;
};

bool takes_part(const Problem& problem, Index item, Index lane, Index slot) {
  const Index slots = problem.extent(Axis::slots);
  const Index in_lane = item * problem.extent(Axis::lanes) + lane;
  const Index index = in_lane * slots + slot;
  const double window = problem.number("window");
  return double(slot) < problem.value_or("lengths", in_lane, double(slots)) &&
         problem.value_or("visible", index, 1) != 0 &&
         (window == 0 ||
          problem.values("query_positions")[at(item)] - problem.value_or("positions", index, double(slot)) <
              window);
}

struct Logits {
  std::vector<long double> z;
  std::vector<double> dot_magnitude;  ///< |scale| sum of |q_i k_i|
  long double largest = -std::numeric_limits<long double>::infinity();
  double magnitude = 0;  ///< max |z|
};

Logits logits_of(const Problem& problem, const std::vector<bool>& takes_part, Index lane, Index query) {
  const Index slots = problem.extent(Axis::slots);
  const Index d = problem.extent(Axis::head_dim);
  const double* q = problem.values("queries").data() + query * d;
  const double* keys = problem.values("keys").data() + lane * slots * d;
  const double scale = problem.number("scale");
  Logits logits{std::vector<long double>(at(slots)), std::vector<double>(at(slots))};
  for (Index slot = 0; slot < slots; ++slot) {
    if (!takes_part[at(slot)]) {
      continue;
    }
    long double dot = 0;
    double magnitude = 0;
    for (Index i = 0; i < d; ++i) {
      const double product = q[i] * keys[slot * d + i];  // exact: both have at most 24 bits
      dot += product;
      magnitude += std::fabs(product);
    }
    logits.z[at(slot)] = dot * scale;
    logits.dot_magnitude[at(slot)] = std::fabs(scale) * magnitude;
    logits.magnitude = std::max(logits.magnitude, std::fabs(double(dot * scale)));
    logits.largest = std::isnan(dot) ? dot : std::max(logits.largest, dot * scale);
    if (std::isnan(dot)) {
      break;
    }
  }
  return logits;
}

Row row_of(const Problem& problem, const Arithmetic& arithmetic, Index item, Index lane, Index head) {
  const Index slots = problem.extent(Axis::slots);
  const Index lanes = problem.extent(Axis::lanes);
  Row row;
  for (Index slot = 0; slot < slots; ++slot) {
    row.takes_part.push_back(takes_part(problem, item, lane, slot));
    row.keys += row.takes_part.back();
  }
  row.probability.resize(at(slots));
  row.logit_error.resize(at(slots));
  if (row.keys == 0) {
    return row;
  }
  const Index in_lane = item * lanes + lane;
  const Logits logits =
      logits_of(problem, row.takes_part, in_lane, in_lane * problem.extent(Axis::group) + head);
  row.is_nan = std::isnan(logits.largest);
  if (row.is_nan) {
    return row;
  }
  long double sum = 0;
  for (Index slot = 0; slot < slots; ++slot) {
    if (row.takes_part[at(slot)]) {
      row.probability[at(slot)] = std::exp(logits.z[at(slot)] - logits.largest);
      sum += row.probability[at(slot)];
    }
  }
  const double common = 8 * arithmetic.u() * logits.magnitude;
  const double dot = arithmetic.gamma(double(problem.extent(Axis::head_dim)) + 3);
  for (Index slot = 0; slot < slots; ++slot) {
    row.probability[at(slot)] /= sum;
    row.logit_error[at(slot)] = std::expm1(dot * logits.dot_magnitude[at(slot)] + common);
    row.mean_error += double(row.probability[at(slot)]) * row.logit_error[at(slot)];
  }
  row.log_sum_exp = logits.largest + std::log(sum);
  row.log_magnitude = double(std::fabs(logits.largest) + std::log(sum));
  return row;
}

/// By how much, relative, a quotient of sums of weights is off: e^Delta over its mean, and so many roundings.
double relative_error(const Row& row, const Arithmetic& arithmetic, double logit_error, double roundings) {
  return row.mean_error < 1 ? (1 + logit_error) * (1 + arithmetic.gamma(roundings)) / (1 - row.mean_error) - 1
                            : kInfinity;
}

double rescalings(const Row& row) {
  return double((row.keys + kTile - 1) / kTile);
}

class Reference {
 public:
  Reference(const Problem& problem, const Arithmetic& arithmetic)
      : problem_(problem), arithmetic_(arithmetic) {
    for (const Tensor& output : problem.outputs) {
      expected_[output.name] = {std::vector<double>(at(problem.size(output))),
                                std::vector<double>(at(problem.size(output)))};
    }
    for (Index item = 0; item < problem.extent(Axis::items); ++item) {
      for (Index lane = 0; lane < problem.extent(Axis::lanes); ++lane) {
        for (Index head = 0; head < problem.extent(Axis::group); ++head) {
          add(item, lane, head);
        }
        finish_sums(item * problem.extent(Axis::lanes) + lane);
      }
    }
  }

  [[nodiscard]] const Expected& of(const std::string& output) const { return expected_.at(output); }

 private:
  void add(Index item, Index lane, Index head) {
    const Row row = row_of(problem_, arithmetic_, item, lane, head);
    const Index in_lane = item * problem_.extent(Axis::lanes) + lane;
    const Index index = in_lane * problem_.extent(Axis::group) + head;
    add_probabilities(row, in_lane, index);
    if (problem_.output("output") != nullptr) {
      add_output(row, in_lane, index);
    }
    if (problem_.output("log_sum_exp") != nullptr) {
      add_log_sum_exp(row, index);
    }
  }

  void add_probabilities(const Row& row, Index in_lane, Index index) {
    const Index slots = problem_.extent(Axis::slots);
    const double length = problem_.value_or("lengths", in_lane, double(slots));
    const double roundings = double(row.keys) + 10 * rescalings(row) + 9;
    for (Index slot = 0; slot < slots; ++slot) {
      const auto a = double(row.probability[at(slot)]);
      double bound = a * relative_error(row, arithmetic_, row.logit_error[at(slot)], roundings) +
                     2 * (rescalings(row) + 2) * arithmetic_.flush();
      const bool is_undefined = double(slot) >= length || row.is_nan;
      if (const Tensor* output = problem_.output("probabilities")) {
        Expected& expected = expected_["probabilities"];
        expected.values[at(index * slots + slot)] = a;
        expected.bounds[at(index * slots + slot)] = is_undefined ? kInfinity
                                                    : !row.takes_part[at(slot)]
                                                        ? 0
                                                        : bound + store_error(output->type, a);
      }
      if (problem_.output("sums") != nullptr) {
        Expected& expected = expected_["sums"];
        bound = is_undefined ? kInfinity : row.takes_part[at(slot)] ? bound : 0;
        expected.values[at(in_lane * slots + slot)] += a;
        expected.bounds[at(in_lane * slots + slot)] += bound;
      }
    }
  }

  void add_output(const Row& row, Index in_lane, Index index) {
    const Index slots = problem_.extent(Axis::slots);
    const Index d = problem_.extent(Axis::head_dim);
    const Tensor& output = *problem_.output("output");
    const double* values = problem_.values("values").data() + in_lane * slots * d;
    const double roundings = 2 * double(row.keys) + 11 * rescalings(row) + 10;
    // The matrix units take weights of 16-bit caches in 16 bits: one rounding more, of the input's type.
    const Type type = problem_.input("values")->type;
    const Format format = format_of(type);
    const double weight_unit = type == Type::float32 ? 0 : format.unit_roundoff();
    const double weight_underflow = type == Type::float32 ? 0 : format.smallest_subnormal() / 2;
    std::vector<double> errors;
    for (const double logit_error : row.logit_error) {
      errors.push_back((1 + relative_error(row, arithmetic_, logit_error, roundings)) * (1 + weight_unit) -
                       1);
    }
    Expected& expected = expected_["output"];
    for (Index i = 0; i < d; ++i) {
      long double sum = 0;
      double bound = 0;
      for (Index slot = 0; slot < slots; ++slot) {
        if (row.takes_part[at(slot)]) {
          const double v = values[slot * d + i];
          sum += row.probability[at(slot)] * v;
          bound += double(row.probability[at(slot)]) * std::fabs(v) * errors[at(slot)] +
                   2 * std::fabs(v) * (weight_underflow + (rescalings(row) + 2) * arithmetic_.flush());
        }
      }
      const bool is_nan = row.is_nan;
      expected.values[at(index * d + i)] = is_nan ? std::nan("") : double(sum);
      expected.bounds[at(index * d + i)] =
          is_nan || row.keys == 0 ? 0 : bound + store_error(output.type, std::fabs(double(sum)) + bound);
    }
  }

  void add_log_sum_exp(const Row& row, Index index) {
    const double gamma = arithmetic_.gamma(double(row.keys) + 5 * rescalings(row) + 4);
    Expected& expected = expected_["log_sum_exp"];
    expected.values[at(index)] = row.is_nan ? std::nan("") : double(row.log_sum_exp);
    expected.bounds[at(index)] = row.keys == 0 ? 0
                                 : row.is_nan || row.mean_error >= 1
                                     ? kInfinity
                                     : -std::log1p(-row.mean_error) + 2 * gamma +
                                           6 * arithmetic_.u() * row.log_magnitude +
                                           store_error(Type::float32, row.log_magnitude);
  }

  /// The group's probabilities are summed: group - 1 additions, and stored.
  void finish_sums(Index in_lane) {
    if (problem_.output("sums") == nullptr) {
      return;
    }
    const Index slots = problem_.extent(Axis::slots);
    Expected& expected = expected_["sums"];
    for (Index i = in_lane * slots; i < (in_lane + 1) * slots; ++i) {
      if (expected.values[at(i)] != 0) {
        expected.bounds[at(i)] +=
            arithmetic_.gamma(double(problem_.extent(Axis::group))) * expected.values[at(i)] +
            store_error(Type::float32, expected.values[at(i)]);
      }
    }
  }

  const Problem& problem_;
  const Arithmetic& arithmetic_;
  std::map<std::string, Expected> expected_;
};

std::vector<Finding> judge(const Problem& problem, const Results& results, const Arithmetic& arithmetic) {
  const Reference reference(problem, arithmetic);
  std::vector<Finding> findings;
  for (const Tensor& output : problem.outputs) {
    compare(problem, output.name, results.at(output.name), reference.of(output.name), findings);
  }
  return findings;
}

/// Lengths have the axes [items, lanes]; probabilities carry the group between them and the slots.
std::vector<bool> defined(const Problem& problem, const Tensor& output) {
  return defined_below_length(problem, output);
}

std::int32_t call(const hae_kernels& kernels, const Problem& problem, const Placement& placed,
                  const ContextOf& context_of) {
  hae_attend_arguments arguments{};
  arguments.queries = placed.array("queries");
  arguments.keys = placed.array("keys");
  arguments.values = placed.array("values");
  arguments.block_table = placed.array("block_table");
  arguments.lengths = placed.array("lengths");
  arguments.visible = placed.array("visible");
  arguments.positions = placed.array("positions");
  arguments.query_positions = placed.array("query_positions");
  arguments.window = Index(problem.number("window"));
  arguments.scale = float(problem.number("scale"));
  arguments.probabilities = placed.array("probabilities");
  arguments.output = placed.array("output");
  arguments.log_sum_exp = placed.array("log_sum_exp");
  arguments.sums = placed.array("sums");
  return launch(kernels, HAE_ATTEND, kernels.attend, arguments, context_of);
}

// ---- faults

/// Query head h reads KV head h mod kv_heads: its queries are answered by that lane. What is seen of it is
/// the queries' permutation; outputs that are not per query head are compared as they are.
std::optional<Problem> tiled(const Problem& problem) {
  const Index lanes = problem.extent(Axis::lanes);
  const Index group = problem.extent(Axis::group);
  if (lanes == 1 || group == 1) {
    return std::nullopt;
  }
  Problem altered = problem;
  const Index heads = lanes * group;
  altered.extents[Axis::lanes] = heads;
  altered.extents[Axis::group] = 1;
  for (Tensor& given : altered.inputs) {
    const bool is_per_lane = std::ranges::count(given.axes, Axis::lanes) > 0 && given.name != "queries";
    if (!is_per_lane) {
      continue;
    }
    const std::vector<double> from = given.values;
    const Index width = std::ssize(from) / std::max(problem.extent(Axis::items) * lanes, Index{1});
    given.values.clear();
    for (Index item = 0; item < problem.extent(Axis::items); ++item) {
      for (Index head = 0; head < heads; ++head) {
        const auto first = from.begin() + (item * lanes + head % lanes) * width;
        given.values.insert(given.values.end(), first, first + width);
      }
    }
  }
  std::erase_if(altered.outputs, [](const Tensor& output) { return output.name == "sums"; });
  return altered.outputs.empty() ? std::nullopt : std::optional(altered);
}

/// Largest logits of rows: the greatest and the least of them, and the greatest magnitude of any logit.
struct Extremes {
  double highest = -kInfinity;
  double lowest = kInfinity;
  double magnitude = 0;
};

Extremes extremes_of(const Problem& problem) {
  Extremes extremes;
  for (Index item = 0; item < problem.extent(Axis::items); ++item) {
    for (Index lane = 0; lane < problem.extent(Axis::lanes); ++lane) {
      std::vector<bool> takes;
      for (Index slot = 0; slot < problem.extent(Axis::slots); ++slot) {
        takes.push_back(takes_part(problem, item, lane, slot));
      }
      const Index in_lane = item * problem.extent(Axis::lanes) + lane;
      for (Index head = 0; head < problem.extent(Axis::group); ++head) {
        const Logits logits =
            logits_of(problem, takes, in_lane, in_lane * problem.extent(Axis::group) + head);
        if (std::ranges::count(takes, true) > 0) {
          extremes.highest = std::max(extremes.highest, double(logits.largest));
          extremes.lowest = std::min(extremes.lowest, double(logits.largest));
          extremes.magnitude = std::max(extremes.magnitude, logits.magnitude);
        }
      }
    }
  }
  return extremes;
}

constexpr double kExponent = 87;  // exp of more overflows float32, exp of less than its negative is subnormal

bool all_findings(const std::vector<Finding>& findings, const std::function<bool(const Finding&)>& holds) {
  const auto is_value = [](const Finding& finding) { return finding.kind == Finding::Kind::value; };
  return std::ranges::any_of(findings, is_value) &&
         std::ranges::all_of(findings,
                             [&](const Finding& finding) { return !is_value(finding) || holds(finding); });
}

bool is_lost(const Finding& finding) {
  return !std::isfinite(finding.got) || finding.got == 0;
}

bool has_no_maximum(const Problem& problem, const Results&, const std::vector<Finding>& findings) {
  return all_findings(findings, is_lost) && extremes_of(problem).magnitude > kExponent;
}

bool has_maximum_from_zero(const Problem& problem, const Results&, const std::vector<Finding>& findings) {
  const Extremes extremes = extremes_of(problem);
  return all_findings(findings, is_lost) && extremes.lowest < -kExponent && extremes.highest < kExponent;
}

bool has_masked_nan(const Problem&, const Results&, const std::vector<Finding>& findings) {
  return all_findings(findings, [](const Finding& finding) {
    return (finding.expected == 0 || finding.expected == -kInfinity) && std::isnan(finding.got);
  });
}

/// Outputs are NaN, and nothing else is wrong, where a value beyond the length is one.
bool has_padding_times_zero(const Problem& problem, const Results& results,
                            const std::vector<Finding>& findings) {
  const auto is_nan_output = [](const Finding& finding) {
    return finding.array == "output" && std::isnan(finding.got);
  };
  if (problem.input("lengths") == nullptr || !all_findings(findings, is_nan_output)) {
    return false;
  }
  const Index row = problem.extent(Axis::group) * problem.extent(Axis::head_dim);  // of a lane
  const auto slots = double(problem.extent(Axis::slots));
  for (Index i = 0; i < std::ssize(results.at("output")); ++i) {
    if (std::isnan(results.at("output")[at(i)]) && problem.values("lengths")[at(i / row)] == slots) {
      return false;
    }
  }
  return true;
}

bool is_base_2(const Problem&, const Results&, const std::vector<Finding>& findings) {
  constexpr double kLn2 = 0.6931471805599453;
  return all_findings(findings, [](const Finding& finding) {
    return finding.array == "log_sum_exp" && std::fabs(finding.got * kLn2 - finding.expected) <=
                                                 1e-4 * std::fabs(finding.expected) + finding.bound;
  });
}

/// Every row of more than one key has a 1 in it: its largest weight.
bool is_not_divided(const Problem& problem, const Results& results, const std::vector<Finding>& findings) {
  const auto probabilities = results.find("probabilities");
  if (probabilities == results.end() ||
      !all_findings(findings, [](const Finding& finding) { return finding.array == "probabilities"; })) {
    return false;
  }
  const Index slots = problem.extent(Axis::slots);
  Index ones = 0;
  Index rows = 0;
  for (auto row = probabilities->second.begin(); slots > 0 && row != probabilities->second.end();
       row += slots) {
    ++rows;
    ones += std::count(row, row + slots, 1.0) > 0;
  }
  return 2 * ones > rows;
}

std::vector<Suspicion> suspicions() {
  std::vector<Suspicion> all{
      {"the maximum starts at 0: the weights of low logits underflow", {}, has_maximum_from_zero},
      {"the maximum is not subtracted before exp: weights overflow", {}, has_no_maximum},
      {"a row in which no slot takes part gives NaN instead of 0", {}, has_masked_nan},
      {"values beyond the length reach the output: a weight of 0 times NaN is NaN",
       {},
       has_padding_times_zero},
      {"log_sum_exp is to base 2 instead of e", {}, is_base_2},
      {"probabilities are weights, not divided by their sum", {}, is_not_divided},
      {"query heads are tiled over KV heads (h mod kv_heads) instead of interleaved (h / group)", tiled},
      {"every query head reads KV head 0",
       [](const Problem& p) -> std::optional<Problem> {
         Problem altered = p;
         const Index lanes = p.extent(Axis::lanes);
         for (Tensor& given : altered.inputs) {
           if (given.name != "keys" && given.name != "values") {
             continue;
           }
           const Index width = p.extent(Axis::slots) * p.extent(Axis::head_dim);
           for (Index i = 0; i < std::ssize(given.values); ++i) {
             given.values[at(i)] = p.values(given.name)[at(i / (lanes * width) * lanes * width + i % width)];
           }
         }
         return altered;
       }},
      {"scale is applied twice",
       [](const Problem& p) { return with_number(p, "scale", p.number("scale") * p.number("scale")); }},
      {"scale is 1 / sqrt(head_dim), whatever is given",
       [](const Problem& p) {
         return with_number(p, "scale", float(1 / std::sqrt(double(p.extent(Axis::head_dim)))));
       }},
      {"item 0's query position is used for every item",
       [](const Problem& p) -> std::optional<Problem> {
         const Tensor* given = p.input("query_positions");
         if (given == nullptr || given->values.empty()) {
           return std::nullopt;
         }
         const double first = given->values.front();
         return with_values(p, "query_positions", [first](double) { return first; });
       }},
      {"scale is not applied", [](const Problem& p) { return with_number(p, "scale", 1); }},
      {"hidden slots take part: `visible` is ignored",
       [](const Problem& p) { return without_input(p, "visible"); }},
      {"the window counts slot numbers: a row number is used as a position",
       [](const Problem& p) { return without_input(p, "positions"); }},
      {"the window is ignored", [](const Problem& p) { return with_number(p, "window", 0); }},
      {"the window is one too wide",
       [](const Problem& p) {
         return with_number(p, "window", p.number("window") + double(p.number("window") > 0));
       }},
      {"the window is one too narrow",
       [](const Problem& p) {
         return with_number(p, "window", p.number("window") - double(p.number("window") > 1));
       }},
      {"values are read where keys lie",
       [](const Problem& p) -> std::optional<Problem> {
         Problem altered = p;
         altered.input("values")->values = p.values("keys");
         return altered;
       }},
  };
  return joined({std::move(all), length_suspicions()});
}

}  // namespace

const Operation kAttend{"attend",  cases, [](const hae_kernels& k) { return k.attend != nullptr; },
                        call,      judge, defined,
                        suspicions};

}  // namespace hae::validate
