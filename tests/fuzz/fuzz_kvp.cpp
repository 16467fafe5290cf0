// The safetensors file of the only head of a recording, of any bytes.

#include "tests/fuzz/target.hpp"
#include "traces/kvp.hpp"

using namespace hae::traces::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const ScratchFile tensors("tensors", {data, size});
  const std::filesystem::path recording = tensors.path().string() + "-recording";
  const std::filesystem::path head = recording / "layer_000000" / "kv_head_000";
  std::filesystem::create_directories(head);
  std::filesystem::rename(tensors.path(), head / "attention_tensors.safetensors");
  hae::traces::KvpOptions options;
  options.sequence.prompt = 2;
  expect_sound_import([&](const auto& to) { hae::traces::import_kvp(recording, to, options); });
  std::filesystem::remove_all(recording);
  return 0;
}
