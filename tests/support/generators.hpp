#pragma once

#include "testing/generators.hpp"
#include "tests/support/interesting.hpp"
#include "tests/support/policy_specs.hpp"
