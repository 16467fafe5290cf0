#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "sim/cli/policy_source.hpp"
#include "sim/policy.hpp"

namespace hae::python {

namespace nb = nanobind;

/// What a caller may name a policy by: a spec `name:key=value`, a policy of the table, or one written in
/// Python (hae.Policy).
///
/// throws  ConfigError for a bad spec, nb::type_error for anything else
std::shared_ptr<const Policy> policy_argument(nb::handle policy);

/// The same for comparisons, where `log:path=RUN.h5` names a stored run.
cli::PolicySource policy_source_argument(nb::handle policy);

}  // namespace hae::python
