#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "sim/cli/command.hpp"
#include "sim/cli/output_file.hpp"
#include "traces/npz.hpp"

namespace hae::cli {
namespace {

struct Options {
  std::string in;
  std::string from;
  std::string out;
  std::string name;
};

void run(const Options& options) {
  check_outputs({options.out}, {options.in});
  traces::NpzOptions npz;
  npz.name = options.name;
  npz.origin.recorder = "hae import";
  npz.origin.command = fmt::format("hae import {} --from {} --out {}", options.in, options.from, options.out);
  traces::import_npz(options.in, options.out, npz);
  fmt::print("{}: imported from {}\n", options.out, options.in);
}

}  // namespace

void add_import(CLI::App& app) {
  const auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("import", "Make a trace from another format");
  command->add_option("in", options->in, "File to import")->required();
  command->add_option("--from", options->from, "Its format: npz")->required()->check(CLI::IsMember({"npz"}));
  command->add_option("--out", options->out, "Trace file to write")->required();
  command->add_option("--name", options->name, "Name of the sequence (default: the file's name)");
  command->footer("Example:\n  hae import attention.npz --from npz --out trace.h5");
  command->callback([options] { run(*options); });
}

}  // namespace hae::cli
