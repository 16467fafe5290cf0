#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "sim/cli/command.hpp"
#include "sim/cli/policy_source.hpp"
#include "sim/cli/terminal.hpp"

namespace hae::cli {
namespace {

void print_all() {
  std::size_t longest = 0;
  for (const reference::PolicyInfo& info : known_policies()) {
    longest = std::max(longest, info.name.size());
  }
  for (const reference::PolicyInfo& info : known_policies()) {
    fmt::print("{:<{}}{}", info.name, longest + 2, paragraph(info.summary, longest + 2));
  }
  print_prose("\n`hae policies NAME` shows a policy's options, source and fidelity.");
}

/// A heading and one line an option, in columns.
std::vector<std::string> option_table(std::span<const reference::OptionInfo> options) {
  std::size_t keys = 6;
  std::size_t defaults = 7;
  std::size_t allowed = 7;
  for (const reference::OptionInfo& option : options) {
    keys = std::max(keys, option.key.size());
    defaults = std::max(defaults, option.default_value.size());
    allowed = std::max(allowed, option.allowed.size());
  }
  std::vector<std::string> lines;
  const auto add_line = [&](std::string_view key, std::string_view value, std::string_view range,
                            std::string_view meaning) {
    lines.push_back(
        fmt::format("{:<{}}  {:<{}}  {:<{}}  {}", key, keys, value, defaults, range, allowed, meaning));
  };
  add_line("option", "default", "allowed", "meaning");
  for (const reference::OptionInfo& option : options) {
    add_line(option.key, option.default_value, option.allowed, option.meaning);
  }
  return lines;
}

/// One paragraph an option, for a terminal that is too narrow for columns.
void print_option_list(std::span<const reference::OptionInfo> options) {
  constexpr std::size_t kIndent = 4;
  for (const reference::OptionInfo& option : options) {
    fmt::print("{}", paragraph(fmt::format("{} (default {}): {}; {}", option.key, option.default_value,
                                           option.meaning, option.allowed),
                               kIndent));
  }
}

void print_one(const reference::PolicyInfo& info) {
  constexpr std::size_t kIndent = 10;
  print_prose("{}: {}\n", info.name, info.summary);
  fmt::print("source    {}", paragraph(info.source, kIndent));
  fmt::print("fidelity  {}", paragraph(info.fidelity, kIndent));
  if (info.options.empty()) {
    return;
  }
  fmt::print("\n");
  const std::vector<std::string> table = option_table(info.options);
  const std::optional<std::size_t> columns = terminal_columns(stdout);
  if (columns && text_width(std::ranges::max(table, {}, text_width)) > *columns) {
    print_option_list(info.options);
    return;
  }
  for (const std::string& line : table) {
    fmt::print("{}\n", line);
  }
}

void print(const std::string& name) {
  std::string known;
  for (const reference::PolicyInfo& info : known_policies()) {
    if (info.name == name) {
      print_one(info);
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(info.name);
  }
  throw ConfigError("unknown policy '" + name + "'; expected one of " + known);
}

}  // namespace

void add_policies(CLI::App& app) {
  auto name = std::make_shared<std::string>();
  CLI::App* command =
      app.add_subcommand("policies", "List the policies, or show one: options, source, fidelity");
  command->add_option("name", *name, "A policy's name")->type_name(kPolicyName);
  command->footer("Example:\n  hae policies hae");
  command->callback([name] { name->empty() ? print_all() : print(*name); });
}

}  // namespace hae::cli
