#include <algorithm>
#include <cmath>
#include <map>

#include "validate/operation.hpp"

// The decision of Dual-Attention Pruning, HAE Eq. (1)-(3). A sum that is closer to its threshold than the
// bound of A_V's own roundings may fall on either side; nothing else may.

namespace hae::validate {
namespace {

struct Form {
  Type type = Type::float64;
  Index items = 1;
  Index slots = 1;
  Index scopes = 1;
  Index sinks = 0;
  double r = 0.0015;
  double alpha = 0x1p-11;
  bool on_threshold = false;  ///< sums and maxima that equal their thresholds exactly
  Layout layout;
};

Problem make(const Form& form, Draw& draw) {
  Problem problem;
  problem.operation = "prune";
  problem.extents = {{Axis::items, form.items}, {Axis::slots, form.slots}};
  problem.numbers = {{"sinks", double(form.sinks)}, {"r", form.r}, {"alpha", form.alpha}};
  problem.layout = form.layout;
  const std::vector<Axis> axes{Axis::items, Axis::slots};
  Tensor sums = tensor("sums", form.type, axes);
  Tensor largest = tensor("largest", form.type, axes);
  Tensor scope = tensor("scope", Type::int32, axes);
  for (Index i = 0; i < form.items * form.slots; ++i) {
    const double u = draw.unit();
    sums.values.push_back(rounded(form.type, form.on_threshold ? double(draw.integer(1, 3)) : u * u * u));
    largest.values.push_back(
        rounded(form.type, form.alpha * (draw.integer(0, 3) == 0 ? 1 : 2 * draw.unit())));
    scope.values.push_back(double(draw.integer(-1, form.scopes - 1)));
  }
  if (form.on_threshold) {  // A_V = 4 slots: sums of 1, 2, 3 and an even correction; r A_V = 2 exactly
    double total = 0;
    for (Index i = 0; i < form.slots; ++i) {
      scope.values[at(i)] = 0;
      total += i + 1 < form.slots ? sums.values[at(i)] : 0;
    }
    sums.values[at(form.slots - 1)] = 4 * double(form.slots) - total;
    problem.numbers["r"] = 2 / (4 * double(form.slots));
  }
  problem.inputs = {sums, largest, scope};
  problem.outputs = {tensor("evicted", Type::uint8, axes)};
  return problem;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const Form& form, const char* what) {
    all.push_back({std::string("prune/") + what + "/" + validate::name_of(form.type) + "/tokens-" +
                       std::to_string(form.slots) + "/scopes-" + std::to_string(form.scopes),
                   [form](Draw& draw) { return make(form, draw); }});
  };
  int i = 0;
  for (const Index slots : boundary_sizes()) {
    for (const Type type : {Type::float64, Type::float32}) {
      Form form{.type = type, .items = 1 + i % 3, .slots = slots, .scopes = 1 + i % 4, .sinks = i % 2 * 4};
      form.r = 0.5 / double(std::max(slots / form.scopes, Index{1}));
      form.layout = {.order = i % 3 == 0 ? Layout::Order::padded : Layout::Order::dense,
                     .misaligned = i % 2 == 0};
      add(form, "threshold");
      ++i;
    }
  }
  for (const Type type : {Type::float64, Type::float32}) {
    add({.type = type, .slots = 64, .on_threshold = true}, "on-threshold");
    add({.type = type, .slots = 256, .alpha = 0x1p-3, .on_threshold = true}, "on-threshold");
  }
  add({.items = 5, .slots = 130, .scopes = 7, .r = 0x1p-4}, "many-scopes");
  add({.slots = 65, .r = 1e9}, "all-go");
  add({.slots = 65, .r = 0}, "none-goes");
  add({.items = 0, .slots = 33}, "empty-batch");
  add({.items = 65537, .slots = 1}, "65537-items");
  add({.items = 2, .slots = 65, .r = 0x1p-6, .layout = {.far = true}}, "far");
  return all;
}

/// A_V of each scope of one item.
std::map<double, long double> totals_of(const Problem& problem, Index item) {
  std::map<double, long double> totals;
  const Index slots = problem.extent(Axis::slots);
  for (Index i = item * slots; i < (item + 1) * slots; ++i) {
    if (problem.values("scope")[at(i)] >= 0) {
      totals[problem.values("scope")[at(i)]] += problem.values("sums")[at(i)];
    }
  }
  return totals;
}

/// docs/validate.md, "DAP": r A_V is a sum of at most n terms, none negative, and one product. Integers below
/// 2^precision and a quotient that is a power of two have no roundings, so thresholds met exactly stay exact.
std::vector<Finding> judge(const Problem& problem, const Results& results, const Arithmetic& arithmetic) {
  Expected expected;
  const Index slots = problem.extent(Axis::slots);
  const double exactly_below = 1 / (2 * arithmetic.u());
  for (Index item = 0; item < problem.extent(Axis::items); ++item) {
    const std::map<double, long double> totals = totals_of(problem, item);
    const std::vector<double>& sums = problem.values("sums");
    bool exact = true;
    for (Index i = item * slots; i < (item + 1) * slots; ++i) {
      exact = exact && sums[at(i)] == std::nearbyint(sums[at(i)]);
    }
    for (Index i = item * slots; i < (item + 1) * slots; ++i) {
      const double scope = problem.values("scope")[at(i)];
      const double sum = sums[at(i)];
      const double total = scope < 0 ? 0 : double(totals.at(scope));
      const double threshold = problem.number("r") * total;
      const bool no_rounding = exact && total < exactly_below && std::nearbyint(threshold) == threshold;
      const double bound =
          no_rounding ? 0 : arithmetic.gamma(double(slots) + 2) * threshold + arithmetic.flush();
      const bool may_go = scope >= 0 && double(i % slots) >= problem.number("sinks") &&
                          problem.values("largest")[at(i)] < problem.number("alpha");
      const bool is_close = may_go && std::fabs(sum - threshold) <= bound && bound > 0;
      expected.values.push_back(may_go && sum < threshold ? 1 : 0);
      expected.bounds.push_back(is_close ? 1 : 0);  // either answer: 0 and 1 are 1 apart
    }
  }
  std::vector<Finding> findings;
  compare(problem, "evicted", results.at("evicted"), expected, findings);
  return findings;
}

std::int32_t call(const hae_kernels& kernels, const Problem& problem, const Placement& placed,
                  const ContextOf& context_of) {
  hae_prune_arguments arguments{};
  arguments.sums = placed.array("sums");
  arguments.largest = placed.array("largest");
  arguments.scope = placed.array("scope");
  arguments.sinks = Index(problem.number("sinks"));
  arguments.r = problem.number("r");
  arguments.alpha = problem.number("alpha");
  arguments.evicted = placed.array("evicted");
  return launch(kernels, HAE_PRUNE, kernels.prune, arguments, context_of);
}

std::vector<Suspicion> suspicions() {
  // The next number towards more evictions turns a strict comparison into one that takes equality in.
  return {
      {"a sum that equals r A_V goes: <= instead of <",
       [](const Problem& p) {
         const double r = p.number("r");
         return with_number(p, "r", std::nextafter(std::nextafter(r, 1e300), 1e300));
       }},
      {"a maximum that equals alpha goes: <= instead of <",
       [](const Problem& p) { return with_number(p, "alpha", std::nextafter(p.number("alpha"), 1e300)); }},
      {"sinks are evicted", [](const Problem& p) { return with_number(p, "sinks", 0); }},
      {"alpha is ignored", [](const Problem& p) { return with_number(p, "alpha", 1e300); }},
      {"one A_V for all scopes",
       [](const Problem& p) {
         return with_values(p, "scope", [](double scope) { return scope > 0 ? 0.0 : scope; });
       }},
      {"tokens that are no candidates count in A_V and are evicted",
       [](const Problem& p) {
         return with_values(p, "scope", [](double scope) { return std::max(scope, 0.0); });
       }},
      {"the last token is left out",
       [](const Problem& p) -> std::optional<Problem> {
         Problem altered = p;
         const Index slots = p.extent(Axis::slots);
         for (Index item = 0; slots > 0 && item < p.extent(Axis::items); ++item) {
           altered.input("scope")->values[at((item + 1) * slots - 1)] = -1;
         }
         return altered;
       }},
  };
}

}  // namespace

const Operation kPrune{"prune",   cases, [](const hae_kernels& k) { return k.prune != nullptr; },
                       call,      judge, all_defined,
                       suspicions};

}  // namespace hae::validate
