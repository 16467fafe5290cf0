// An HDF5 file of square attention, of any bytes.

#include "tests/fuzz/target.hpp"
#include "traces/attention_saver.hpp"

using namespace hae::traces::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const ScratchFile from("in.h5", {data, size});
  hae::traces::AttentionSaverOptions options;
  options.sequence.prompt = 2;
  expect_sound_import([&](const auto& to) { hae::traces::import_attention_saver(from.path(), to, options); });
  return 0;
}
