#pragma once

#include "testing/memory_trace.hpp"
#include "tests/support/policy_specs.hpp"
