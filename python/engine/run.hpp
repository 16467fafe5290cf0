#pragma once

#include <nanobind/nanobind.h>

#include "sim/cli/comparison.hpp"

namespace hae::python {

/// A finished run as Python holds it.
struct RunHandle {
  cli::RunRecord record;
};

}  // namespace hae::python
