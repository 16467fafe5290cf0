#pragma once

#include <nanobind/nanobind.h>

namespace hae::python {

namespace nb = nanobind;

// Each adds its classes and functions to hae._engine.
void bind_sequences(nb::module_& m);
void bind_policies(nb::module_& m);
void bind_python_policies(nb::module_& m);
void bind_runs(nb::module_& m);
void bind_comparison(nb::module_& m);
void bind_closed_loop(nb::module_& m);
void bind_validate(nb::module_& m);

}  // namespace hae::python
