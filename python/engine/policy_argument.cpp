#include "python/engine/policy_argument.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/engine/module.hpp"
#include "python/engine/python_policy.hpp"
#include "reference/policies.hpp"

namespace hae::python {
namespace {

/// A policy of the table, ready to run. Policies are immutable, so Python may hold them as mutable.
struct NativePolicy {
  std::shared_ptr<const Policy> policy;
};

nb::typed<nb::dict, nb::str, nb::str> options_of(const Policy& policy) {
  nb::dict options;
  for (const auto& [key, value] : policy.options()) {
    options[key.c_str()] = value;
  }
  return options;
}

nb::typed<nb::list, nb::dict> table() {
  const auto text = [](std::string_view view) { return std::string(view); };
  nb::list lines;
  for (const reference::PolicyInfo& info : cli::known_policies()) {
    nb::dict options;
    for (const reference::OptionInfo& option : info.options) {
      nb::dict line;
      line["default"] = text(option.default_value);
      line["allowed"] = text(option.allowed);
      line["meaning"] = text(option.meaning);
      options[text(option.key).c_str()] = line;
    }
    nb::dict line;
    line["name"] = text(info.name);
    line["summary"] = text(info.summary);
    line["source"] = text(info.source);
    line["fidelity"] = text(info.fidelity);
    line["options"] = options;
    lines.append(line);
  }
  return lines;
}

}  // namespace

std::shared_ptr<const Policy> policy_argument(nb::handle policy) {
  if (nb::isinstance<NativePolicy>(policy)) {
    return nb::cast<const NativePolicy&>(policy).policy;
  }
  if (nb::isinstance<nb::str>(policy)) {
    return reference::make_policy(nb::cast<std::string>(policy));
  }
  return make_python_policy(nb::borrow(policy));
}

cli::PolicySource policy_source_argument(nb::handle policy) {
  if (nb::isinstance<nb::str>(policy)) {
    return {nb::cast<std::string>(policy), /*lock=*/true};
  }
  return cli::PolicySource(policy_argument(policy));
}

void bind_policies(nb::module_& m) {
  nb::class_<NativePolicy>(m, "NativePolicy", "A policy of the table with its options.")
      .def(
          "__init__",
          [](NativePolicy* self, const std::string& spec) {
            new (self) NativePolicy{reference::make_policy(spec)};
          },
          nb::arg("spec"))
      .def_prop_ro(
          "spec", [](const NativePolicy& p) { return p.policy->spec(); },
          "Canonical: the name and the options that were given.")
      .def_prop_ro(
          "options", [](const NativePolicy& p) { return options_of(*p.policy); },
          "Every option, defaults too.")
      .def_prop_ro(
          "lanes",
          [](const NativePolicy& p) { return p.policy->lanes() == LaneKind::layer ? "layer" : "kv_head"; })
      .def("__repr__", [](const NativePolicy& p) { return "<hae policy " + p.policy->spec() + ">"; });
  m.def("policy_table", &table, "One dict a policy: name, summary, source, fidelity, options.");
}

}  // namespace hae::python
