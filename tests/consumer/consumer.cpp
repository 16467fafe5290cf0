#include <cstdio>
#include <memory>
#include <vector>

#include "analysis/least_loss.hpp"
#include "reference/policies.hpp"
#include "sim/replay.hpp"
#include "traces/synth.hpp"
#include "traces/trace_file.hpp"

// Writes a synthetic trace, replays it through a policy and prints how many evictions there were.
int main(int argc, char** argv) {
  if (argc != 2) {
    return 2;
  }
  hae::traces::SynthOptions options;
  options.prompt = 40;
  options.tokens = 60;
  options.image_tokens = 10;
  hae::traces::write_synthetic_trace(argv[1], options);
  hae::traces::TraceFile file(argv[1]);
  const std::unique_ptr<hae::Sequence> sequence = file.open(0);
  const auto results =
      hae::replay(*sequence, {hae::reference::make_policy("greedy:budget=30")}, {}, file.name());
  std::printf("%zu evictions\n", results.front().log.entries.size());
  // One of two prompt tokens leaves before the only step: this links without the solver's library.
  const std::vector<double> mass{2.0, 1.0, 1.0};
  const std::vector<hae::Index> residents{2};
  const auto least = hae::analysis::least_loss_evictions({mass.data(), {1, 3}}, 2, residents);
  return results.front().log.entries.empty() || least.size() != 1 || least.front().token != 1 ? 1 : 0;
}
