#include "sim/cli/device_backend.hpp"

#include <CLI/CLI.hpp>

#include "sim/cli/command.hpp"

// Of a build without Thrust.

namespace hae::cli {

std::string device_system() {
  return "";
}

void check_backend(const std::string& backend) {
  if (backend != kReferenceBackend) {
    throw DeviceError("--backend " + backend + ": built without " +
                      (backend == kCudaBackend ? "CUDA" : "a device backend") + "; use --backend reference");
  }
}

std::vector<std::vector<std::shared_ptr<const Policy>>> run_on_device(std::span<const DeviceTask> /*tasks*/,
                                                                      NanRule /*nan*/) {
  throw DeviceError("built without a device backend; use --backend reference");
}

void add_bench(CLI::App& app) {
  CLI::App* command = app.add_subcommand("bench", "Measure what evicting costs on the device");
  command->allow_extras();
  command->callback([] { check_backend(kDeviceBackend); });
}

}  // namespace hae::cli
