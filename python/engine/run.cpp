#include "python/engine/run.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <limits>

#include "python/engine/arrays.hpp"
#include "python/engine/module.hpp"
#include "sim/cli/result_json.hpp"

namespace hae::python {
namespace {

/// Columns of a list of entries: name -> numpy array, `absent` where an entry has no value.
template <typename Entries, typename Get>
nb::object column(const Entries& entries, const Get& get) {
  std::vector<decltype(get(entries.front()))> values;
  for (const auto& entry : entries) {
    values.push_back(get(entry));
  }
  return array_of(std::move(values));
}

constexpr Index kNone = -1;

nb::dict log_columns(const RunHandle& run) {
  const std::vector<LogEntry>& entries = run.record.result.log.entries;
  nb::dict columns;
  columns["step"] = column(entries, [](const LogEntry& e) { return e.step; });
  columns["layer"] = column(entries, [](const LogEntry& e) { return e.layer; });
  columns["lane"] = column(entries, [](const LogEntry& e) { return e.lane; });
  columns["token"] = column(entries, [](const LogEntry& e) { return e.token; });
  columns["within"] = column(entries, [](const LogEntry& e) { return std::uint8_t(e.within); });
  columns["score"] = column(
      entries, [](const LogEntry& e) { return e.score.value_or(std::numeric_limits<double>::quiet_NaN()); });
  columns["pending_since"] =
      column(entries, [](const LogEntry& e) { return e.pending_since.value_or(kNone); });
  columns["into"] = column(entries, [](const LogEntry& e) { return e.into.value_or(kNone); });
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

nb::object series_arrays(nb::handle self, Series& series) {
  if (series.rows == 0) {
    return nb::none();
  }
  nb::dict metrics;
  for (const Metric metric : kMetrics) {
    metrics[name(metric)] = array_of(series.values[static_cast<std::size_t>(metric)].data(),
                                     {at(series.layers), at(series.query_heads), at(series.rows)}, self);
  }
  return metrics;
}

Index lanes_of(const RunHandle& run) {
  return lane_count(run.record.info, run.record.result.lanes);
}

nb::list limits_list(const RunHandle& run) {
  nb::list list;
  for (const Limits& limits : run.record.result.limits) {
    nb::dict line;
    line["sinks"] = limits.sinks;
    line["recent"] = limits.recent;
    line["budget"] = limits.budget;
    line["bin"] = limits.bin;
    line["capacity"] = limits.capacity;
    list.append(line);
  }
  return list;
}

nb::dict options_dict(const RunHandle& run) {
  nb::dict options;
  for (const auto& [key, value] : run.record.options) {
    options[key.c_str()] = value;
  }
  return options;
}

}  // namespace

void bind_runs(nb::module_& m) {
  const auto self_of = [](nb::handle self) -> RunHandle& { return nb::cast<RunHandle&>(self); };
  nb::class_<RunHandle>(m, "NativeRun")
      .def_prop_ro(
          "info", [](const RunHandle& r) -> const SequenceInfo& { return r.record.info; },
          nb::rv_policy::reference_internal)
      .def_prop_ro("sequence_index", [](const RunHandle& r) { return r.record.sequence_index; })
      .def_prop_ro("policy", [](const RunHandle& r) { return r.record.spec; })
      .def_prop_ro("options", &options_dict)
      .def_prop_ro(
          "lanes",
          [](const RunHandle& r) { return r.record.result.lanes == LaneKind::layer ? "layer" : "kv_head"; })
      .def_prop_ro("limits", &limits_list)
      .def("log_columns", &log_columns)
      .def("pending_columns", &pending_columns)
      .def_prop_ro(
          "decode",
          [self_of](nb::handle self) { return series_arrays(self, self_of(self).record.result.decode); })
      .def_prop_ro(
          "prefill",
          [self_of](nb::handle self) { return series_arrays(self, self_of(self).record.result.prefill); })
      .def_prop_ro("top_now",
                   [self_of](nb::handle self) {
                     RunHandle& run = self_of(self);
                     return array_of(run.record.result.top_now.data(),
                                     {at(run.record.info.layers), at(run.record.info.query_heads),
                                      at(run.record.info.steps())},
                                     self);
                   })
      .def_prop_ro("attention_tokens",
                   [self_of](nb::handle self) {
                     RunHandle& run = self_of(self);
                     return array_of(
                         run.record.result.attention_tokens.data(),
                         {at(run.record.info.layers), at(lanes_of(run)), at(run.record.info.steps())}, self);
                   })
      .def_prop_ro("final_tokens",
                   [self_of](nb::handle self) {
                     RunHandle& run = self_of(self);
                     return array_of(run.record.result.final_tokens.data(),
                                     {at(run.record.info.layers), at(lanes_of(run))}, self);
                   })
      .def_prop_ro("optimal", [](const RunHandle& r) { return r.record.optimal; })
      .def_prop_ro("removed_all_rows", [](const RunHandle& r) { return r.record.result.removed_all_rows; })
      .def_prop_ro("masked_rows", [](const RunHandle& r) { return r.record.result.masked_rows; })
      .def_prop_ro("warnings", [](const RunHandle& r) { return r.record.result.warnings; })
      .def("json_lines", [](const RunHandle& r) { return to_json_lines(r.record.result.log); })
      .def("json", [](const RunHandle& r) { return cli::run_json(r.record).dump(); });
}

}  // namespace hae::python
