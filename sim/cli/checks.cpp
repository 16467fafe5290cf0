#include "sim/cli/checks.hpp"

#include <fmt/format.h>
#include <pugixml.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>

#include "reference/options.hpp"
#include "sim/errors.hpp"

namespace hae::cli {
namespace {

[[noreturn]] void refuse_rule(const std::string& text, const std::string& reason) {
  throw ConfigError(
      fmt::format("--fail-if '{}': {}; expected [POLICY:]FIGURE OP NUMBER[x], e.g. 'missed_mass.mean>1.05x'",
                  text, reason));
}

std::string trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(' ');
  const auto last = text.find_last_not_of(' ');
  return first == std::string_view::npos ? "" : std::string(text.substr(first, last - first + 1));
}

/// The path in a summary that a rule's figure means.
std::string figure_path(const std::string& text, const std::string& name) {
  std::string known;
  for (const std::string path : run_figures()) {
    if (path == name || path == "decode." + name) {
      return path;
    }
    known += (known.empty() ? "" : ", ") + path;
  }
  refuse_rule(text, fmt::format("figure '{}' is unknown, the figures are {}", name, known));
}

/// The mean of a figure of one policy's line; none if it is null.
std::optional<double> mean_of(const Json& line, const std::string& path) {
  const auto found = line.find(path);
  if (found == line.end() || !found->is_object() || !found->contains("mean") ||
      !(*found)["mean"].is_number()) {
    return std::nullopt;
  }
  return (*found)["mean"].get<double>();
}

bool compares(double value, const std::string& comparison, double limit) {
  if (comparison == "<") {
    return value < limit;
  }
  if (comparison == "<=") {
    return value <= limit;
  }
  return comparison == ">" ? value > limit : value >= limit;
}

bool applies(const Rule& rule, const std::string& spec) {
  return rule.policy.empty() || rule.policy == spec || rule.policy == reference::Options::name_of(spec);
}

Check check_rule(const Rule& rule, const Json& line, const Json* baseline) {
  Check check{line["policy"].get<std::string>(), rule.text, false, ""};
  const std::optional<double> value = mean_of(line, rule.figure);
  if (!value) {
    check.message = rule.figure + " is null";
    return check;
  }
  double limit = rule.number;
  std::string origin = "the limit";
  if (baseline != nullptr) {
    const std::optional<double> base = mean_of(*baseline, rule.figure);
    if (!base) {
      check.message = rule.figure + " is null in the baseline";
      return check;
    }
    limit = rule.number * *base;
    origin = fmt::format("{} times the baseline's {}", rule.number, *base);
  }
  check.passed = !compares(*value, rule.comparison, limit);
  check.message = fmt::format("{} is {}, {} is {}", rule.figure, *value, origin, limit);
  return check;
}

const Json& line_of(const Json& summary, const std::string& policy, const std::string& rule) {
  const auto line = std::ranges::find_if(summary, [&](const Json& l) { return l["policy"] == policy; });
  if (line == summary.end()) {
    refuse_rule(rule, fmt::format("the baseline has no policy '{}'", policy));
  }
  return *line;
}

/// Text that XML 1.0 can hold: what is not UTF-8, and characters that no document may have, become U+FFFD.
std::string xml_text(const std::string& text) {
  constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
  const auto utf8 =
      Json::parse(Json(text).dump(-1, ' ', false, Json::error_handler_t::replace)).get<std::string>();
  std::string allowed;
  for (std::size_t i = 0; i < utf8.size(); ++i) {
    const std::string_view rest = std::string_view(utf8).substr(i);
    if (rest.starts_with("\xEF\xBF\xBE") || rest.starts_with("\xEF\xBF\xBF")) {
      allowed += kReplacement;
      i += 2;
    } else if (static_cast<unsigned char>(utf8[i]) < 0x20 && utf8[i] != '\t' && utf8[i] != '\n' &&
               utf8[i] != '\r') {
      allowed += kReplacement;
    } else {
      allowed += utf8[i];
    }
  }
  return allowed;
}

}  // namespace

Rule parse_rule(const std::string& text) {
  Rule rule;
  rule.text = text;
  const std::size_t begin = text.find_first_of("<>");
  if (begin == std::string::npos) {
    refuse_rule(text, "it has no comparison");
  }
  const std::size_t end = begin + (text.compare(begin + 1, 1, "=") == 0 ? 2 : 1);
  rule.comparison = text.substr(begin, end - begin);
  const std::string left = trimmed(std::string_view(text).substr(0, begin));
  const std::size_t colon = left.rfind(':');
  if (colon != std::string::npos) {
    rule.policy = trimmed(std::string_view(left).substr(0, colon));
  }
  rule.figure =
      figure_path(text, trimmed(std::string_view(left).substr(colon == std::string::npos ? 0 : colon + 1)));
  std::string number = trimmed(std::string_view(text).substr(end));
  rule.relative = number.ends_with('x');
  if (rule.relative) {
    number.pop_back();
    number = trimmed(number);
  }
  const auto parsed = std::from_chars(number.data(), number.data() + number.size(), rule.number);
  if (parsed.ec != std::errc{} || parsed.ptr != number.data() + number.size() ||
      !std::isfinite(rule.number)) {
    refuse_rule(text, fmt::format("'{}' is not a number", number));
  }
  return rule;
}

std::vector<Check> check_rules(const std::vector<Rule>& rules, const Json& summary,
                               const std::optional<Json>& baseline) {
  std::vector<Check> checks;
  for (const Rule& rule : rules) {
    if (rule.relative && !baseline) {
      refuse_rule(rule.text, "a multiple needs --baseline");
    }
    const std::size_t before = checks.size();
    for (const Json& line : summary) {
      const auto policy = line["policy"].get<std::string>();
      if (applies(rule, policy)) {
        checks.push_back(
            check_rule(rule, line, rule.relative ? &line_of(*baseline, policy, rule.text) : nullptr));
      }
    }
    if (checks.size() == before) {
      refuse_rule(rule.text, fmt::format("no policy of this comparison is '{}'", rule.policy));
    }
  }
  return checks;
}

std::vector<Check> check_equal_bytes(const Json& summary, bool allow_unequal) {
  std::vector<Check> checks;
  for (const Json& line : summary) {
    const bool unequal = line["unequal"].get<bool>();
    checks.push_back(
        {line["policy"].get<std::string>(), kEqualBytes, !unequal || allow_unequal,
         unequal ? "mean bytes differ from the first policy's by over 1 % and one token a lane" : ""});
  }
  return checks;
}

std::string junit_text(const std::string& suite_name, const std::vector<Check>& checks) {
  pugi::xml_document document;
  pugi::xml_node suite = document.append_child("testsuites").append_child("testsuite");
  suite.append_attribute("name") = suite_name.c_str();
  suite.append_attribute("tests") = checks.size();
  suite.append_attribute("failures") =
      std::ranges::count_if(checks, [](const Check& check) { return !check.passed; });
  suite.append_attribute("errors") = 0;
  for (const Check& check : checks) {
    pugi::xml_node test = suite.append_child("testcase");
    test.append_attribute("classname") = xml_text(check.policy).c_str();
    test.append_attribute("name") = xml_text(check.name).c_str();
    if (!check.passed) {
      test.append_child("failure").append_attribute("message") = xml_text(check.message).c_str();
    } else if (!check.message.empty()) {
      test.append_child("system-out").text() = xml_text(check.message).c_str();
    }
  }
  std::ostringstream text;
  document.save(text, "  ");
  return text.str();
}

}  // namespace hae::cli
