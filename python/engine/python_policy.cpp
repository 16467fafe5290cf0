#include "python/engine/python_policy.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "python/engine/arrays.hpp"
#include "python/engine/choice.hpp"
#include "python/engine/module.hpp"
#include "sim/errors.hpp"

namespace hae::python {
namespace {

LaneKind lanes_named(const std::string& word, const std::string& what) {
  return choose<LaneKind>(word, {{"kv_head", LaneKind::kv_head}, {"layer", LaneKind::layer}}, what);
}

PromptRows prompt_rows_named(const std::string& word, const std::string& what) {
  return choose<PromptRows>(
      word, {{"all", PromptRows::all}, {"none", PromptRows::none}, {"text", PromptRows::text}}, what);
}

HeadReduction heads_named(const std::string& word) {
  return choose<HeadReduction>(
      word, {{"max", HeadReduction::max}, {"mean", HeadReduction::mean}, {"sum", HeadReduction::sum}},
      "heads");
}

Attention attention_named(const std::string& word) {
  return choose<Attention>(word, {{"full", Attention::full}, {"observed", Attention::observed}}, "attention");
}

Effect effect_named(const std::string& word) {
  return choose<Effect>(word, {{"after", Effect::after}, {"within", Effect::within}}, "effect");
}

/// What a policy is lent for the duration of a call.
template <typename Value>
class Lent {
 public:
  explicit Lent(const Value& value) : value_(&value) {}

  [[nodiscard]] const Value& operator*() const {
    if (value_ == nullptr) {
      throw ContractViolation(
          "rows and caches are lent for the call that got them; copy what is needed later");
    }
    return *value_;
  }
  [[nodiscard]] const Value* operator->() const { return &**this; }
  void take_back() { value_ = nullptr; }

 private:
  const Value* value_;
};

/// Rows as Python sees them, with the lanes of the policy that looks.
struct LentRows {
  Lent<Rows> rows;
  LaneKind lanes;
};
using LentCache = Lent<LayerCache>;

/// Lends a value to Python while this lives.
template <typename Handle>
class Loan {
 public:
  explicit Loan(Handle handle) : object_(nb::cast(std::move(handle), nb::rv_policy::move)) {}
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;
  ~Loan() { take_back(nb::cast<Handle&>(object_)); }
  [[nodiscard]] const nb::object& object() const { return object_; }

 private:
  static void take_back(LentRows& rows) { rows.rows.take_back(); }
  static void take_back(LentCache& cache) { cache.take_back(); }

  nb::object object_;
};

std::optional<Merge> merge_of(nb::handle given) {
  if (given.is_none()) {
    return std::nullopt;
  }
  const auto number = [&](const char* name) { return nb::cast<double>(given.attr(name)); };
  return Merge{nb::cast<Index>(given.attr("into")), number("kept_weight"), number("weight"), number("size")};
}

Decision decision_of(nb::handle given, Index layer) {
  Decision decision;
  if (given.is_none()) {
    return decision;
  }
  for (nb::handle entry : given.attr("evict")) {
    const auto lane = nb::cast<std::optional<Index>>(entry.attr("lane"));
    decision.evict.push_back({nb::cast<std::optional<Index>>(entry.attr("layer")).value_or(layer),
                              lane.value_or(Evict::kEveryLane), nb::cast<Index>(entry.attr("token")),
                              nb::cast<std::optional<double>>(entry.attr("score")),
                              merge_of(entry.attr("merge"))});
  }
  for (nb::handle entry : given.attr("mark")) {
    decision.mark.push_back({nb::cast<Index>(entry.attr("lane")), nb::cast<Index>(entry.attr("token"))});
  }
  decision.effect = effect_named(nb::cast<std::string>(given.attr("effect")));
  decision.warnings = nb::cast<std::vector<std::string>>(nb::list(given.attr("warnings")));
  return decision;
}

/// A Python object that any thread may let go of.
class Held {
 public:
  explicit Held(nb::object object) : object_(std::move(object)) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    const nb::gil_scoped_acquire gil;
    object_.reset();
  }
  [[nodiscard]] const nb::object& operator*() const { return object_; }

 private:
  nb::object object_;
};

using State = std::shared_ptr<const Held>;

class PythonDecode final : public LayerDecode {
 public:
  PythonDecode(State state, LaneKind lanes) : state_(std::move(state)), lanes_(lanes) {}

  Decision step(const Rows& row, const LayerCache& cache) override {
    const nb::gil_scoped_acquire gil;
    const Loan<LentRows> rows({Lent(row), lanes_});
    const Loan<LentCache> residents{LentCache(cache)};
    return decision_of((**state_).attr("step")(rows.object(), residents.object()), row.layer());
  }

 private:
  State state_;
  LaneKind lanes_;
};

/// [kv_heads, T, head_dim], or None.
nb::object copy_of(const View<const float, 3>& vectors) {
  if (vectors.empty()) {
    return nb::none();
  }
  return nb::cast(array_of(std::vector<float>(vectors.data(), vectors.data() + vectors.size()),
                           {at(vectors.extent(0)), at(vectors.extent(1)), at(vectors.extent(2))}));
}

class PythonRun final : public Run {
 public:
  PythonRun(State state, LaneKind lanes) : state_(std::move(state)), lanes_(lanes) {}

  void begin_layer(Index layer, const LayerVectors& vectors) override {
    const nb::gil_scoped_acquire gil;
    (**state_).attr("begin_layer")(layer, copy_of(vectors.keys), copy_of(vectors.values));
  }

  void observe(const Rows& block) override {
    const nb::gil_scoped_acquire gil;
    const Loan<LentRows> rows({Lent(block), lanes_});
    (**state_).attr("observe")(rows.object());
  }

  Decision prune(Index layer, const LayerCache& cache) override { return decide("prune", layer, cache); }
  Decision fit(Index layer, const LayerCache& cache) override { return decide("fit", layer, cache); }

  Decision balance(const std::vector<LayerCache>& caches) override {
    const nb::gil_scoped_acquire gil;
    std::vector<std::unique_ptr<Loan<LentCache>>> loans;
    nb::list list;
    for (const LayerCache& cache : caches) {
      loans.push_back(std::make_unique<Loan<LentCache>>(LentCache(cache)));
      list.append(loans.back()->object());
    }
    return decision_of((**state_).attr("balance")(list), static_cast<Index>(caches.size()) - 1);
  }

  std::unique_ptr<LayerDecode> decode(Index) override {
    return std::make_unique<PythonDecode>(state_, lanes_);
  }

  [[nodiscard]] Limits limits(Index layer, Index lane) const override {
    const nb::gil_scoped_acquire gil;
    const nb::object given = (**state_).attr("limits")(layer, lane);
    const auto optional = [&](const char* name) { return nb::cast<std::optional<Index>>(given.attr(name)); };
    return {nb::cast<Index>(given.attr("sinks")),
            nb::cast<Index>(given.attr("recent")),
            optional("budget"),
            optional("bin"),
            optional("capacity"),
            nb::cast<bool>(given.attr("grows"))};
  }

 private:
  Decision decide(const char* moment, Index layer, const LayerCache& cache) {
    const nb::gil_scoped_acquire gil;
    const Loan<LentCache> residents{LentCache(cache)};
    return decision_of((**state_).attr(moment)(layer, residents.object()), layer);
  }

  State state_;
  LaneKind lanes_;
};

class PythonPolicy final : public Policy {
 public:
  explicit PythonPolicy(nb::object object) : policy_(std::make_shared<Held>(std::move(object))) {
    const nb::object& policy = **policy_;
    spec_ = nb::cast<std::string>(policy.attr("spec")());
    const nb::object options = policy.attr("options");
    for (nb::handle key : options) {
      const nb::object value = options[key];
      options_.emplace_back(nb::str(key).c_str(), nb::str(value).c_str());
    }
    merges_ = nb::cast<bool>(policy.attr("merges"));
    lanes_ = lanes_named(nb::cast<std::string>(policy.attr("lanes")), spec_ + ": lanes");
  }

  [[nodiscard]] std::string spec() const override { return spec_; }
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> options() const override { return options_; }
  [[nodiscard]] LaneKind lanes() const override { return lanes_; }
  [[nodiscard]] bool merges() const override { return merges_; }

  [[nodiscard]] Needs needs(const SequenceInfo& info, Index layer) const override {
    const nb::gil_scoped_acquire gil;
    const nb::object needs = (**policy_).attr("needs")(nb::cast(info, nb::rv_policy::copy), layer);
    return {prompt_rows_named(nb::cast<std::string>(needs.attr("prompt_rows")), spec_ + ": prompt_rows"),
            nb::cast<Index>(needs.attr("newest_prompt_rows")), nb::cast<bool>(needs.attr("keys")),
            nb::cast<bool>(needs.attr("values"))};
  }

  [[nodiscard]] std::unique_ptr<Run> begin(const SequenceInfo& info) const override {
    const nb::gil_scoped_acquire gil;
    nb::object state = (**policy_).attr("begin")(nb::cast(info, nb::rv_policy::copy));
    return std::make_unique<PythonRun>(std::make_shared<Held>(std::move(state)), lanes_);
  }

 private:
  State policy_;
  std::string spec_;
  std::vector<std::pair<std::string, std::string>> options_;
  LaneKind lanes_;
  bool merges_ = false;
};

/// One past the last key that any of the rows sees.
Index keys_of(const Rows& rows) {
  Index keys = 0;
  for (Index r = 0; r < rows.rows(); ++r) {
    keys = std::max(keys, rows.visible(r).back().end);
  }
  return keys;
}

NumpyArray<Index> queries(const LentRows& lent) {
  std::vector<Index> positions;
  for (Index r = 0; r < lent.rows->rows(); ++r) {
    positions.push_back(lent.rows->query(r));
  }
  return array_of(std::move(positions));
}

NumpyArray<double> values(const LentRows& lent, Index lane, const std::string& heads,
                          const std::string& attention) {
  const Reduction reduction{lent.lanes, heads_named(heads), attention_named(attention)};
  const Index rows = lent.rows->rows();
  const Index keys = keys_of(*lent.rows);
  std::vector<double> out;
  out.reserve(at(rows * keys));
  for (Index r = 0; r < rows; ++r) {
    const std::span<const double> row = lent.rows->values(reduction, lane, r);
    out.insert(out.end(), row.begin(), row.begin() + keys);
  }
  return array_of(std::move(out), {at(rows), at(keys)});
}

NumpyArray<bool> visible(const LentRows& lent) {
  const Index rows = lent.rows->rows();
  const Index keys = keys_of(*lent.rows);
  auto owned = std::make_unique<bool[]>(at(rows * keys));  // a std::vector<bool> is no array
  bool* seen = owned.get();
  for (Index r = 0; r < rows; ++r) {
    for (const Range& range : lent.rows->visible(r)) {
      std::fill(seen + r * keys + range.begin, seen + r * keys + range.end, true);
    }
  }
  return array_of(seen, {at(rows), at(keys)}, owner_of(std::move(owned)));
}

Index checked_lane(const LayerCache& cache, Index lane) {
  if (lane < 0 || lane >= cache.lanes()) {
    throw nb::index_error(("lane " + std::to_string(lane) + " of " + std::to_string(cache.lanes())).c_str());
  }
  return lane;
}

NumpyArray<Index> residents(const LentCache& cache, Index lane) {
  return residents_of(*cache, checked_lane(*cache, lane));
}

NumpyArray<Index> pending(const LentCache& cache, Index lane) {
  const std::span<const Index> marked = cache->pending(checked_lane(*cache, lane));
  return array_of(std::vector<Index>(marked.begin(), marked.end()));
}

}  // namespace

std::shared_ptr<const Policy> make_python_policy(nb::object object) {
  for (const char* member : {"spec", "options", "lanes", "merges", "needs", "begin"}) {
    if (!nb::hasattr(object, member)) {
      throw nb::type_error(
          ("not a policy: " + nb::cast<std::string>(nb::repr(object)) +
           "; give a spec such as 'greedy:budget=64', or an object of a class derived from hae.Policy")
              .c_str());
    }
  }
  return std::make_shared<PythonPolicy>(std::move(object));
}

void bind_python_policies(nb::module_& m) {
  nb::class_<LentRows>(m, "Rows",
                       "Attention of some queries over the residents of a cache, lent for one call.")
      .def_prop_ro("layer", [](const LentRows& r) { return r.rows->layer(); })
      .def_prop_ro("queries", &queries, nb::rv_policy::reference,
                   "[rows] positions of the queries, ascending.")
      .def("values", &values, nb::arg("lane") = 0, nb::arg("heads") = "mean",
           nb::arg("attention") = "observed",
           "[rows, keys] of one lane, by position; keys is one past the last visible one. Over the lane's "
           "query heads: "
           "their mean, max or sum of a' (observed: over the residents) or a (full). The array is yours.")
      .def("visible", &visible, "[rows, keys] bool: whether the mask allows the key, resident or not.");
  nb::class_<LentCache>(m, "Cache", "Which tokens each lane of a layer holds, lent for one call.")
      .def_prop_ro("lanes", [](const LentCache& c) { return c->lanes(); })
      .def_prop_ro(
          "joined", [](const LentCache& c) { return c->joined(); },
          "Positions [0, joined) have entered, whether they are still here or not.")
      .def("residents", &residents, nb::arg("lane") = 0,
           "Positions that the lane holds, pending ones too, ascending.")
      .def(
          "size", [](const LentCache& c, Index lane) { return c->residents(checked_lane(*c, lane)); },
          nb::arg("lane") = 0, "How many tokens the lane holds, pending ones too.")
      .def("pending", &pending, nb::arg("lane") = 0,
           "Marked positions that are still resident, in the order of marking.");
}

}  // namespace hae::python
