#include "sim/cli/run_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

namespace hae::cli {
namespace {

/// Code points of UTF-8 text: what a terminal shows as one column each, for the characters used here.
std::size_t width(const std::string& text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }));
}

/// A mean, with half the width of its interval if there is one.
std::string figure_text(const Json& figure, const char* format, double unit = 1.0) {
  if (figure.is_null()) {
    return "-";
  }
  const auto number = [&](double x) { return fmt::format(fmt::runtime(format), x / unit); };
  const std::string mean = number(figure["mean"].get<double>());
  if (figure["interval95"].is_null()) {
    return mean;
  }
  return mean + " ± " + number(figure["interval95"][1].get<double>() - figure["mean"].get<double>());
}

}  // namespace

std::string format_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  for (const std::vector<std::string>& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (std::size_t c = 0; c < row.size(); ++c) {
      widths[c] = std::max(widths[c], width(row[c]));
    }
  }
  std::string text;
  for (const std::vector<std::string>& row : rows) {
    for (std::size_t c = 0; c < row.size(); ++c) {
      const std::string padding(widths[c] - width(row[c]), ' ');
      text += c == 0 ? row[c] + padding : "  " + padding + row[c];
    }
    text.resize(text.find_last_not_of(' ') + 1);
    text += '\n';
  }
  return text;
}

std::string mean_text(const Json& figure, const char* format) {
  return figure.is_null() ? "-" : fmt::format(fmt::runtime(format), figure["mean"].get<double>());
}

std::string summary_table(const Json& summary) {
  std::vector<std::vector<std::string>> rows = {{"policy", "tokens mean", "peak", "KiB mean",
                                                 "missed mass mean", "optimal", "p95", "max", "missed pull",
                                                 "rel. output error", "evictions", "events", ""}};
  for (const Json& policy : summary) {
    rows.push_back(
        {policy["policy"].get<std::string>(), mean_text(policy["tokens.mean"], "{:.1f}"),
         mean_text(policy["tokens.peak"], "{:.1f}"), figure_text(policy["bytes.mean"], "{:.1f}", 1024.0),
         figure_text(policy["decode.missed_mass.mean"], "{:.4f}"),
         mean_text(policy["optimal_mean"], "{:.4f}"), mean_text(policy["decode.missed_mass.p95"], "{:.4f}"),
         mean_text(policy["decode.missed_mass.max"], "{:.4f}"),
         figure_text(policy["decode.missed_pull.mean"], "{:.4f}"),
         figure_text(policy["decode.output_error_relative.mean"], "{:.4f}"),
         mean_text(policy["evictions"], "{:.1f}"), mean_text(policy["events"], "{:.1f}"),
         policy["unequal"].get<bool>() ? "unequal" : ""});
  }
  return format_table(rows);
}

std::string kinds_table(const Json& summary) {
  std::vector<std::vector<std::string>> rows = {{"policy", "evicted visual", "text before", "text after",
                                                 "generated", "kept visual", "text before", "text after",
                                                 "generated"}};
  for (const Json& policy : summary) {
    std::vector<std::string>& row = rows.emplace_back(std::vector{policy["policy"].get<std::string>()});
    for (const auto& [figure, format] : {std::pair("evicted_kinds", "{:.1f}"), {"kept_kinds", "{:.3f}"}}) {
      for (const TokenKind kind : kTokenKinds) {
        row.push_back(mean_text(policy[fmt::format("{}.{}", figure, name(kind))], format));
      }
    }
  }
  return format_table(rows);
}

std::string overlap_table(const Json& overlap) {
  std::vector<std::vector<std::string>> rows = {{"policy"}};
  for (std::size_t p = 0; p < overlap["policies"].size(); ++p) {
    rows.front().push_back(fmt::format("{}", p + 1));
    std::vector<std::string>& row = rows.emplace_back(
        std::vector{fmt::format("{} {}", p + 1, overlap["policies"][p].get<std::string>())});
    for (const Json& mean : overlap["mean"][p]) {
      row.push_back(fmt::format("{:.3f}", mean.get<double>()));
    }
  }
  return format_table(rows);
}

std::string warning_lines(const Json& runs) {
  std::vector<std::pair<std::string, std::string>> order;         // warning and policy
  std::map<std::string, std::map<std::string, Index>> sequences;  // that a warning and a policy concern
  std::set<std::string> policies;
  for (const Json& run : runs) {
    const auto policy = run["policy"].get<std::string>();
    policies.insert(policy);
    for (const Json& warning : run["warnings"]) {
      if (sequences[warning.get<std::string>()][policy]++ == 0) {
        order.emplace_back(warning.get<std::string>(), policy);
      }
    }
  }
  std::string text;
  for (const auto& [warning, policy] : order) {
    const auto by_policy = sequences.find(warning);
    if (by_policy == sequences.end()) {
      continue;  // It was said of all policies.
    }
    const Index count = by_policy->second.at(policy);
    const bool is_shared =
        policies.size() > 1 && by_policy->second.size() == policies.size() &&
        std::ranges::all_of(by_policy->second, [&](const auto& of) { return of.second == count; });
    text += fmt::format("warning: {}: {}{}\n", is_shared ? "all policies" : policy, warning,
                        count > 1 ? fmt::format(" ({} sequences)", count) : "");
    if (is_shared) {
      sequences.erase(by_policy);
    }
  }
  return text;
}

}  // namespace hae::cli
