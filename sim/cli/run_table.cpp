#include "sim/cli/run_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

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

std::string mean_text(const Json& figure, const char* format) {
  return figure.is_null() ? "-" : fmt::format(fmt::runtime(format), figure["mean"].get<double>());
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
      const bool last_and_left = c + 1 == row.size() && c == 0;
      text += c == 0 ? row[c] + (last_and_left ? "" : padding) : "  " + padding + row[c];
    }
    text += '\n';
  }
  return text;
}

std::string summary_table(const Json& summary) {
  std::vector<std::vector<std::string>> rows = {{"policy", "tokens mean", "peak", "KiB mean",
                                                 "missed mass mean", "optimal", "p95", "max",
                                                 "rel. output error", "evictions", "events", ""}};
  for (const Json& policy : summary) {
    rows.push_back(
        {policy["policy"].get<std::string>(), mean_text(policy["tokens.mean"], "{:.1f}"),
         mean_text(policy["tokens.peak"], "{:.1f}"), figure_text(policy["bytes.mean"], "{:.1f}", 1024.0),
         figure_text(policy["decode.missed_mass.mean"], "{:.4f}"),
         mean_text(policy["optimal_mean"], "{:.4f}"), mean_text(policy["decode.missed_mass.p95"], "{:.4f}"),
         mean_text(policy["decode.missed_mass.max"], "{:.4f}"),
         figure_text(policy["decode.output_error_relative.mean"], "{:.4f}"),
         mean_text(policy["evictions"], "{:.1f}"), mean_text(policy["events"], "{:.1f}"),
         policy["unequal"].get<bool>() ? "unequal" : ""});
  }
  return format_table(rows);
}

std::string warning_lines(const Json& runs) {
  std::vector<std::string> order;
  std::map<std::string, Index> counts;
  for (const Json& run : runs) {
    for (const Json& warning : run["warnings"]) {
      const std::string line = run["policy"].get<std::string>() + ": " + warning.get<std::string>();
      if (counts[line]++ == 0) {
        order.push_back(line);
      }
    }
  }
  std::string text;
  for (const std::string& line : order) {
    text +=
        "warning: " + line + (counts[line] > 1 ? fmt::format(" ({} sequences)", counts[line]) : "") + "\n";
  }
  return text;
}

}  // namespace hae::cli
