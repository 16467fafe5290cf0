#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <cstdio>
#include <memory>

#include "reference/policies.hpp"
#include "sim/cli/command.hpp"
#include "sim/cli/run_table.hpp"

namespace hae::cli {
namespace {

void print_all() {
  for (const reference::PolicyInfo& info : reference::policies()) {
    fmt::print("{:<16}{}\n", info.name, info.summary);
  }
  fmt::print("\n`hae policies NAME` shows a policy's options, source and fidelity.\n");
}

void print_one(const std::string& name) {
  std::string known;
  for (const reference::PolicyInfo& info : reference::policies()) {
    known += (known.empty() ? "" : ", ") + std::string(info.name);
    if (info.name != name) {
      continue;
    }
    fmt::print("{}: {}\n\nsource    {}\nfidelity  {}\n", info.name, info.summary, info.source, info.fidelity);
    if (!info.options.empty()) {
      fmt::print("\n{:<12} {:<10} {:<48} {}\n", "option", "default", "allowed", "meaning");
    }
    for (const reference::OptionInfo& option : info.options) {
      fmt::print("{:<12} {:<10} {:<48} {}\n", option.key, option.default_value, option.allowed,
                 option.meaning);
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
