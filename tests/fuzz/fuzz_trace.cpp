// A trace file of any bytes.

#include "tests/fuzz/target.hpp"

using namespace hae::traces::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const ScratchFile file("trace.h5", {data, size});
  expect_sound([&] { read_trace(file.path()); });
  return 0;
}
