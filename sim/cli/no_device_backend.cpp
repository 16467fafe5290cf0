#include "sim/cli/device_backend.hpp"

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

}  // namespace hae::cli
