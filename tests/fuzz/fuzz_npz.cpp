// A numpy archive of any bytes.

#include "tests/fuzz/target.hpp"
#include "traces/npz.hpp"

using namespace hae::traces::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const ScratchFile from("in.npz", {data, size});
  hae::traces::NpzOptions options;
  options.largest_array_bytes = 1 << 20;
  expect_sound_import([&](const auto& to) { hae::traces::import_npz(from.path(), to, options); });
  return 0;
}
