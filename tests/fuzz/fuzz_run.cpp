// A run file of any bytes.

#include "tests/fuzz/target.hpp"
#include "traces/run_file.hpp"

using namespace hae::traces::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const ScratchFile file("run.h5", {data, size});
  expect_sound([&] { static_cast<void>(hae::traces::read_runs(file.path())); });
  return 0;
}
