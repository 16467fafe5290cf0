#pragma once

#include <string>

#include "traces/problem_file.hpp"
#include "validate/validate.hpp"

namespace hae::cli {

/// A counterexample as a file keeps it, and back.
traces::StoredProblem stored(const validate::Outcome& outcome);

/// throws  ConfigError for words that mean nothing, and for a problem that is none
validate::Problem problem_of(const traces::StoredProblem& stored);

}  // namespace hae::cli
