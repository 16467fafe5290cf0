#include "python/engine/run.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>

#include "python/engine/arrays.hpp"
#include "python/engine/module.hpp"
#include "sim/cli/result_json.hpp"

namespace hae::python {
namespace {

/// One member of each entry.
template <typename Entries, typename Get>
auto column(const Entries& entries, const Get& get) {
  std::vector<decltype(get(entries.front()))> values;
  for (const auto& entry : entries) {
    values.push_back(get(entry));
  }
  return array_of(std::move(values));
}

nb::dict log_columns(const RunHandle& run) {
  static constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<LogEntry>& entries = run.record.result.log.entries;
  nb::dict columns;
  columns["step"] = column(entries, [](const LogEntry& e) { return e.step; });
  columns["layer"] = column(entries, [](const LogEntry& e) { return e.layer; });
  columns["lane"] = column(entries, [](const LogEntry& e) { return e.lane; });
  columns["token"] = column(entries, [](const LogEntry& e) { return e.token; });
  columns["within"] = column(entries, [](const LogEntry& e) { return std::uint8_t(e.within); });
  columns["score"] = column(entries, [](const LogEntry& e) { return e.score.value_or(kNan); });
  columns["pending_since"] = column(entries, [](const LogEntry& e) { return e.pending_since.value_or(-1); });
  columns["into"] = column(entries, [](const LogEntry& e) { return e.merge ? e.merge->into : -1; });
  if (run.record.result.merges) {
    columns["kept_weight"] =
        column(entries, [](const LogEntry& e) { return e.merge ? e.merge->kept_weight : kNan; });
    columns["weight"] = column(entries, [](const LogEntry& e) { return e.merge ? e.merge->weight : kNan; });
    columns["size"] = column(entries, [](const LogEntry& e) { return e.merge ? e.merge->size : kNan; });
  }
  return columns;
}

nb::dict pending_columns(const RunHandle& run) {
  const std::vector<PendingEntry>& entries = run.record.result.log.pending;
  nb::dict columns;
  columns["layer"] = column(entries, [](const PendingEntry& e) { return e.layer; });
  columns["lane"] = column(entries, [](const PendingEntry& e) { return e.lane; });
  columns["token"] = column(entries, [](const PendingEntry& e) { return e.token; });
  columns["since"] = column(entries, [](const PendingEntry& e) { return e.since; });
  return columns;
}

/// What a run holds, as read-only arrays that keep the run alive.
class RunArrays {
 public:
  explicit RunArrays(nb::handle self) : self_(self), record_(nb::cast<const RunHandle&>(self).record) {}

  [[nodiscard]] NumpyArray<const double> top_now() const {
    return array_of(record_.result.top_now.data(),
                    {at(record_.info.layers), at(record_.info.query_heads), at(record_.info.steps())}, self_);
  }

  [[nodiscard]] NumpyArray<const Index> attention_tokens() const {
    return array_of(record_.result.attention_tokens.data(),
                    {at(record_.info.layers), lanes(), at(record_.info.steps())}, self_);
  }

  [[nodiscard]] NumpyArray<const Index> final_tokens() const {
    return array_of(record_.result.final_tokens.data(), {at(record_.info.layers), lanes()}, self_);
  }

  using Metrics = std::optional<nb::typed<nb::dict, nb::str, NumpyArray<const double>>>;
  [[nodiscard]] Metrics decode() const { return metrics(record_.result.decode); }
  [[nodiscard]] Metrics prefill() const { return metrics(record_.result.prefill); }

 private:
  [[nodiscard]] std::size_t lanes() const { return at(lane_count(record_.info, record_.result.lanes)); }

  [[nodiscard]] Metrics metrics(const Series& series) const {
    if (series.rows == 0) {
      return std::nullopt;
    }
    nb::dict arrays;
    for (const Metric metric : kMetrics) {
      arrays[name(metric)] = array_of(series.all(metric).data(),
                                      {at(series.layers), at(series.query_heads), at(series.rows)}, self_);
    }
    return arrays;
  }

  nb::handle self_;
  const cli::RunRecord& record_;
};

nb::dict limits_dict(const Limits& limits) {
  nb::dict line;
  line["sinks"] = limits.sinks;
  line["recent"] = limits.recent;
  line["budget"] = limits.budget;
  line["bin"] = limits.bin;
  line["capacity"] = limits.capacity;
  line["grows"] = limits.grows;
  return line;
}

/// [layers][lanes]
nb::typed<nb::list, nb::typed<nb::list, nb::dict>> limits_lists(const RunHandle& run) {
  nb::list layers;
  const Index lanes = lane_count(run.record.info, run.record.result.lanes);
  const std::vector<Limits>& all = run.record.result.limits;
  for (auto first = all.begin(); first != all.end(); first += lanes) {
    nb::list of_layer;
    std::for_each(first, first + lanes, [&](const Limits& limits) { of_layer.append(limits_dict(limits)); });
    layers.append(of_layer);
  }
  return layers;
}

nb::typed<nb::dict, nb::str, nb::str> options_dict(const RunHandle& run) {
  nb::dict options;
  for (const auto& [key, value] : run.record.options) {
    options[key.c_str()] = value;
  }
  return options;
}

}  // namespace

void bind_runs(nb::module_& m) {
  nb::class_<RunHandle>(m, "NativeRun", "What hae.Run shows.")
      .def_prop_ro(
          "info", [](const RunHandle& r) -> const SequenceInfo& { return r.record.info; },
          nb::rv_policy::reference_internal)
      .def_prop_ro("policy", [](const RunHandle& r) { return r.record.spec; })
      .def_prop_ro("options", &options_dict)
      .def_prop_ro(
          "lanes",
          [](const RunHandle& r) { return r.record.result.lanes == LaneKind::layer ? "layer" : "kv_head"; })
      .def_prop_ro("limits", &limits_lists)
      .def("log_columns", &log_columns)
      .def("pending_columns", &pending_columns)
      .def_prop_ro("decode", [](nb::handle self) { return RunArrays(self).decode(); })
      .def_prop_ro("prefill", [](nb::handle self) { return RunArrays(self).prefill(); })
      .def_prop_ro("top_now", [](nb::handle self) { return RunArrays(self).top_now(); })
      .def_prop_ro("attention_tokens", [](nb::handle self) { return RunArrays(self).attention_tokens(); })
      .def_prop_ro("final_tokens", [](nb::handle self) { return RunArrays(self).final_tokens(); })
      .def_prop_ro("optimal", [](const RunHandle& r) { return r.record.optimal; })
      .def_prop_ro("removed_all_rows", [](const RunHandle& r) { return r.record.result.removed_all_rows; })
      .def_prop_ro("masked_rows", [](const RunHandle& r) { return r.record.result.masked_rows; })
      .def_prop_ro("warnings", [](const RunHandle& r) { return r.record.result.warnings; })
      .def("json_lines", [](const RunHandle& r) { return to_json_lines(r.record.result.log); })
      .def("json", [](const RunHandle& r) { return cli::run_json(r.record).dump(); });
}

}  // namespace hae::python
