#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "sim/policy.hpp"

namespace hae::python {

namespace nb = nanobind;

/// A policy written in Python (python/hae/policy_class.py) as the engine calls it: the same moments, the same
/// checks. Every call takes the interpreter's lock for its own duration, so layers that decode in parallel
/// take turns.
///
/// object  has spec, options, lanes, needs, begin as hae.Policy does
/// throws  nb::type_error for an object that is no policy
std::shared_ptr<const Policy> make_python_policy(nb::object object);

}  // namespace hae::python
