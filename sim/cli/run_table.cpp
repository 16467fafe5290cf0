#include "sim/cli/run_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "sim/cli/terminal.hpp"

namespace hae::cli {
namespace {

constexpr std::string_view kGap = "  ";
constexpr std::size_t kLeast = 16;  ///< how wide a column may be on any terminal

/// Columns that stay beside the one before them; takes the mark off their headings.
std::set<std::size_t> take_joined(std::vector<std::string>& heading) {
  std::set<std::size_t> joined;
  for (std::size_t c = 0; c < heading.size(); ++c) {
    if (heading[c].starts_with('&')) {
      heading[c].erase(0, 1);
      joined.insert(c);
    }
  }
  return joined;
}

std::vector<std::size_t> widths_of(const Rows& rows) {
  std::vector<std::size_t> widths;
  for (const std::vector<std::string>& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (std::size_t c = 0; c < row.size(); ++c) {
      widths[c] = std::max(widths[c], text_width(row[c]));
    }
  }
  return widths;
}

std::string padding(const std::string& text, std::size_t width) {
  return std::string(width - std::min(width, text_width(text)), ' ');
}

/// A cell in lines as wide as its column. A name begins at the left, anything else ends at the right.
std::vector<std::string> cell_lines(const std::string& text, std::size_t width, bool is_name) {
  std::vector<std::string> lines{text};
  if (text_width(text) > width) {
    lines = wrapped(text, width - (is_name ? kGap.size() : 0));
  }
  for (std::string& line : lines) {
    if (is_name && &line != &lines.front()) {
      line.insert(0, kGap);
    }
    line.insert(is_name ? line.size() : 0, padding(line, width));
  }
  return lines;
}

/// One row: the first column and the columns [begin, end). Cells that are too wide take several lines.
std::string row_text(const std::vector<std::string>& row, const std::vector<std::size_t>& widths,
                     std::size_t begin, std::size_t end) {
  std::vector<std::string> lines = cell_lines(row.front(), widths.front(), true);
  for (std::size_t c = begin; c < std::min(end, row.size()); ++c) {
    const std::vector<std::string> cell = cell_lines(row[c], widths[c], false);
    lines.resize(std::max(lines.size(), cell.size()), padding("", text_width(lines.front())));
    for (std::size_t l = 0; l < lines.size(); ++l) {
      lines[l].append(kGap).append(l < cell.size() ? cell[l] : padding("", widths[c]));
    }
  }
  std::string text;
  for (const std::string& line : lines) {
    text.append(line, 0, line.find_last_not_of(' ') + 1) += '\n';
  }
  return text;
}

/// The first column and the columns [begin, end) of all rows.
std::string part_of_table(const Rows& rows, const std::vector<std::size_t>& widths, std::size_t begin,
                          std::size_t end) {
  std::string heading = row_text(rows.front(), widths, begin, end);
  heading.pop_back();  // The line ends as plain as it began.
  std::string text = painted(heading, fmt::emphasis::bold) + '\n';
  for (std::size_t r = 1; r < rows.size(); ++r) {
    text += row_text(rows[r], widths, begin, end);
  }
  return text;
}

/// Where the part of a table ends that begins at a column and fits a terminal: where nothing is joined, if it
/// can be. One column always fits.
std::size_t end_of_part(const std::vector<std::size_t>& widths, const std::set<std::size_t>& joined,
                        std::size_t begin, std::size_t columns) {
  std::size_t end = begin;  // of the columns that fit and are not joined to the next
  std::size_t used = widths.front();
  for (std::size_t c = begin; c < widths.size(); ++c) {
    end = joined.contains(c) ? end : c;
    used += kGap.size() + widths[c];
    if (used > columns && c > begin) {
      return end > begin ? end : c;
    }
  }
  return widths.size();
}

/// A bar of eighths of a column, with the spaces that make it as wide as the longest.
std::string bar(double share, std::size_t longest) {
  constexpr std::array kEighths = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const auto eighths = static_cast<std::size_t>(std::lround(share * 8.0 * static_cast<double>(longest)));
  std::string text;
  for (std::size_t full = 0; full < eighths / 8; ++full) {
    text += "█";
  }
  text += kEighths.at(eighths % 8);
  return text + padding(text, longest);
}

/// A small number does not read as 0.
std::string number_text(double x, const char* format) {
  std::string text = fmt::format(fmt::runtime(format), x);
  return x != 0.0 && text.find_first_of("123456789") == std::string::npos ? fmt::format("{:.1e}", x) : text;
}

/// A mean, with half the width of its interval if there is one.
std::string figure_text(const Json& figure, const char* format, double unit = 1.0) {
  if (figure.is_null()) {
    return "-";
  }
  const auto number = [&](double x) { return number_text(x / unit, format); };
  const std::string mean = number(figure["mean"].get<double>());
  if (figure["interval95"].is_null()) {
    return mean;
  }
  return mean + " ± " + number(figure["interval95"][1].get<double>() - figure["mean"].get<double>());
}

}  // namespace

std::string format_table(Rows rows) {
  const std::optional<std::size_t> columns = terminal_columns(stdout);
  const std::set<std::size_t> joined = take_joined(rows.front());
  std::vector<std::size_t> widths = widths_of(rows);
  const std::size_t all = std::accumulate(widths.begin(), widths.end(), kGap.size() * (widths.size() - 1));
  if (!columns || all <= *columns) {
    return part_of_table(rows, widths, 1, widths.size());
  }
  widths.front() = std::min(widths.front(), std::max(kLeast, *columns / 2));
  for (std::size_t c = 1; c < widths.size(); ++c) {
    widths[c] =
        std::min(widths[c], std::max(kLeast, *columns - std::min(*columns, widths.front() + kGap.size())));
  }
  std::string text;
  for (std::size_t begin = 1; begin < widths.size();) {
    const std::size_t end = end_of_part(widths, joined, begin, *columns);
    text += (text.empty() ? "" : "\n") + part_of_table(rows, widths, begin, end);
    begin = end;
  }
  return text;
}

std::string mean_text(const Json& figure, const char* format) {
  return figure.is_null() ? "-" : number_text(figure["mean"].get<double>(), format);
}

std::string summary_table(const Json& summary) {
  Rows rows = {{"policy", "tokens mean", "&peak", "KiB mean", "missed mass mean", "&optimal", "&p95", "&max",
                "missed pull", "rel. output error", "evictions", "&events", "&"}};
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
  Rows rows = {{"policy", "evicted visual", "&text before", "&text after", "&generated", "kept visual",
                "&text before", "&text after", "&generated"}};
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

std::string bars(const Json& summary) {
  const auto mean = [](const Json& figure) { return figure.is_null() ? 0.0 : figure["mean"].get<double>(); };
  const bool has_pull = std::ranges::none_of(
      summary, [](const Json& policy) { return policy["decode.missed_pull.mean"].is_null(); });
  const char* const figure = has_pull ? "decode.missed_pull.mean" : "decode.missed_mass.mean";
  double most = 0.0;
  for (const Json& policy : summary) {
    most = std::max(most, mean(policy[figure]));
  }
  if (summary.size() < 2 || !(most > 0.0)) {
    return "";
  }
  constexpr std::size_t kLongest = 24;
  const std::size_t longest = std::min(kLongest, terminal_columns(stdout).value_or(80) / 4);
  Rows rows{{"policy", has_pull ? "missed pull" : "missed mass", "&"}};
  for (const Json& policy : summary) {
    rows.push_back({policy["policy"].get<std::string>(), mean_text(policy[figure], "{:.4f}"),
                    bar(mean(policy[figure]) / most, longest)});
  }
  return format_table(rows);
}

std::string overlap_table(const Json& overlap) {
  Rows rows = {{"policy"}};
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
    text += fmt::format("{} {}: {}{}\n", painted("warning:", fmt::fg(fmt::terminal_color::yellow)),
                        is_shared ? "all policies" : policy, warning,
                        count > 1 ? fmt::format(" ({} sequences)", count) : "");
    if (is_shared) {
      sequences.erase(by_policy);
    }
  }
  return text;
}

}  // namespace hae::cli
