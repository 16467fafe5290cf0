#include "python/engine/module.hpp"

#include <nanobind/stl/string.h>

#include "sim/cli/manifest.hpp"
#include "sim/errors.hpp"

namespace hae::python {
namespace {

/// The library's errors, with the sentences that the program prints.
void bind_errors(nb::module_& m) {
  const nb::exception<TraceError> trace_error(m, "TraceError", PyExc_ValueError);
  nb::exception<NeedsError>(m, "NeedsError", trace_error.ptr());
  nb::exception<ConfigError>(m, "ConfigError", PyExc_ValueError);
  nb::exception<OutputError>(m, "OutputError", PyExc_OSError);
  nb::exception<DeviceError>(m, "DeviceError", PyExc_RuntimeError);
  nb::exception<ContractViolation>(m, "ContractViolation", PyExc_RuntimeError);
}

}  // namespace
}  // namespace hae::python

NB_MODULE(_engine, m) {
  using namespace hae::python;
  m.doc() = "The engine of HAE lab. Use it through the package `hae`.";
  bind_errors(m);
  m.def("version", &hae::cli::version_text, "Version, compiler and backend, as `hae --version` prints them.");
  bind_sequences(m);
  bind_policies(m);
  bind_python_policies(m);
  bind_runs(m);
  bind_comparison(m);
  bind_closed_loop(m);
  bind_validate(m);
}
