#pragma once

#include <optional>
#include <string>
#include <vector>

#include "sim/cli/result_json.hpp"

namespace hae::cli {

/// A condition under which a comparison fails: `[POLICY:]FIGURE OP NUMBER[x]`, e.g. `missed_mass.mean>1.05x`
/// or `hae:missed_mass.max>=0.95`.
///
/// POLICY is a name or a canonical spec; without it every policy is held to the rule. FIGURE is a figure of
/// `summary` by its path, `decode.` may be left out. OP is one of < <= > >=. A number with an x is a multiple
/// of the baseline's figure of the same policy.
struct Rule {
  std::string text;
  std::string policy;  ///< empty: every policy
  std::string figure;
  std::string comparison;
  double number = 0;
  bool relative = false;
};

/// throws  ConfigError that says what is allowed
Rule parse_rule(const std::string& text);

/// What became of one condition for one policy.
struct Check {
  std::string policy;
  std::string name;
  bool passed = false;
  std::string message;  ///< the figures that were compared
};

/// Holds a summary to rules. A figure that is null cannot be compared and fails.
///
/// baseline  the `summary` to which multiples refer
/// throws    ConfigError when a rule names no policy of the summary, or a multiple has no baseline
std::vector<Check> check_rules(const std::vector<Rule>& rules, const Json& summary,
                               const std::optional<Json>& baseline);

/// The name of check_equal_bytes' checks.
inline constexpr const char* kEqualBytes = "equal mean bytes";

/// One check a policy: whether its mean bytes equal the first policy's.
std::vector<Check> check_equal_bytes(const Json& summary, bool allow_unequal);

/// The checks as JUnit XML, one test case each.
///
/// suite  its name, e.g. `hae compare`
std::string junit_text(const std::string& suite, const std::vector<Check>& checks);

}  // namespace hae::cli
