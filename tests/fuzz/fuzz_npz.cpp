// A numpy archive of any bytes; a trace that the importer makes of it must be sound.

#include <stdexcept>

#include "tests/fuzz/target.hpp"
#include "traces/npz.hpp"

using namespace hae::traces::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const ScratchFile from("in.npz", {data, size});
  const ScratchFile to("out.h5");
  hae::traces::NpzOptions options;
  options.largest_array_bytes = 1 << 20;
  bool imported = false;
  expect_sound([&] {
    hae::traces::import_npz(from.path(), to.path(), options);
    imported = true;
  });
  if (imported && read_trace(to.path()) != 0) {
    throw std::logic_error("the importer wrote a trace that does not pass its check");
  }
  return 0;
}
