#include "validate/validate.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <map>

#include "python/engine/module.hpp"
#include "sim/cli/result_json.hpp"

namespace hae::python {
namespace {

using cli::Json;

Json json_of(const validate::Outcome& outcome) {
  Json findings = Json::array();
  for (const validate::Finding& finding : outcome.findings) {
    findings.push_back({{"kind", validate::name_of(finding.kind)}, {"text", finding.text}});
  }
  return {{"case", outcome.name}, {"findings", findings}};
}

Json json_of(const validate::OperationReport& report) {
  Json failures = Json::array();
  for (const validate::Outcome& outcome : report.outcomes) {
    if (outcome.status == validate::Outcome::Status::failed) {
      failures.push_back(json_of(outcome));
    }
  }
  Json json{{"operation", report.operation},     {"passed", report.passed}, {"failed", report.failed},
            {"unsupported", report.unsupported}, {"fault", report.fault},   {"failures", failures},
            {"left_out", report.left_out}};
  if (report.smallest) {
    json["smallest"] = json_of(*report.smallest);
    json["smallest"]["problem"] = validate::describe(report.smallest->problem);
    json["smallest"]["arrays"] = validate::written_out(report.smallest->problem);
  }
  return json;
}

/// table     address of a hae_kernels
/// progress  called before each case; what it raises ends the validation
std::string validate_table(std::uintptr_t table, const std::string& operation, const std::string& one_case,
                           const std::vector<std::string>& outputs, std::uint64_t seed,
                           const nb::callable& progress) {
  validate::Options options{
      .seed = seed, .operations = {operation}, .one_case = one_case, .outputs = outputs};
  options.progress = [&](const std::string& name, double done) { progress(name, done); };
  // NaN and infinities stand in sentences only, so JSON can hold the report.
  return json_of(validate::validate(*reinterpret_cast<const hae_kernels*>(table), options).front()).dump();
}

/// Bytes of the structs of kernels.h, for those who write them down once more.
std::map<std::string, std::size_t> kernel_struct_bytes() {
  return {{"hae_array", sizeof(hae_array)},
          {"hae_context", sizeof(hae_context)},
          {"hae_memory", sizeof(hae_memory)},
          {"hae_kernels", sizeof(hae_kernels)},
          {"add_scores", sizeof(hae_add_scores_arguments)},
          {"select_lowest", sizeof(hae_select_lowest_arguments)},
          {"select_from_rows", sizeof(hae_select_from_rows_arguments)},
          {"prune", sizeof(hae_prune_arguments)},
          {"compact", sizeof(hae_compact_arguments)},
          {"attend", sizeof(hae_attend_arguments)}};
}

}  // namespace

void bind_validate(nb::module_& m) {
  m.def("validate_table", &validate_table, nb::arg("table"), nb::arg("operation"), nb::arg("case"),
        nb::arg("outputs"), nb::arg("seed"), nb::arg("progress"),
        "A report on one operation of a table of kernels, as JSON.");
  m.def(
      "validate_cases",
      [](const std::string& operation) { return validate::case_names(validate::operation_of(operation)); },
      nb::arg("operation"), "The names of all cases of an operation.");
  m.def("kernel_struct_bytes", &kernel_struct_bytes, "Bytes of each struct of hae/kernels.h.");
}

}  // namespace hae::python
