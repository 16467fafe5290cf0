#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "sim/cli/command.hpp"
#include "sim/cli/policy_source.hpp"

namespace hae::cli {
namespace {

void print_all() {
  std::size_t longest = 0;
  for (const reference::PolicyInfo& info : known_policies()) {
    longest = std::max(longest, info.name.size());
  }
  for (const reference::PolicyInfo& info : known_policies()) {
    fmt::print("{:<{}}{}\n", info.name, longest + 2, info.summary);
  }
  fmt::print("\n`hae policies NAME` shows a policy's options, source and fidelity.\n");
}

void print_one(const std::string& name) {
  std::string known;
  for (const reference::PolicyInfo& info : known_policies()) {
    known += (known.empty() ? "" : ", ") + std::string(info.name);
    if (info.name != name) {
      continue;
    }
    fmt::print("{}: {}\n\nsource    {}\nfidelity  {}\n", info.name, info.summary, info.source, info.fidelity);
    std::size_t keys = 6;
    std::size_t defaults = 7;
    std::size_t allowed = 7;
    for (const reference::OptionInfo& option : info.options) {
      keys = std::max(keys, option.key.size());
      defaults = std::max(defaults, option.default_value.size());
      allowed = std::max(allowed, option.allowed.size());
    }
    const auto print_line = [&](std::string_view key, std::string_view value, std::string_view range,
                                std::string_view meaning) {
      fmt::print("{:<{}}  {:<{}}  {:<{}}  {}\n", key, keys, value, defaults, range, allowed, meaning);
    };
    if (!info.options.empty()) {
      fmt::print("\n");
      print_line("option", "default", "allowed", "meaning");
    }
    for (const reference::OptionInfo& option : info.options) {
      print_line(option.key, option.default_value, option.allowed, option.meaning);
    }
    return;
  }
  throw ConfigError("unknown policy '" + name + "'; expected one of " + known);
}

}  // namespace

void add_policies(CLI::App& app) {
  auto name = std::make_shared<std::string>();
  CLI::App* command =
      app.add_subcommand("policies", "List the policies, or show one: options, source, fidelity");
  command->add_option("name", *name, "A policy's name");
  command->footer("Example:\n  hae policies hae");
  command->callback([name] { name->empty() ? print_all() : print_one(*name); });
}

}  // namespace hae::cli
