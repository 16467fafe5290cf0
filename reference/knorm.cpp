#include "reference/key_scores.hpp"
#include "reference/policies.hpp"
#include "reference/similar_keys.hpp"

namespace hae::reference {
namespace {

/// -‖k_j‖₂
std::vector<double> minus_norms(const View<const float, 2>& keys, Index tokens) {
  std::vector<double> scores;
  for (Index j = 0; j < tokens; ++j) {
    scores.push_back(-norm(keys[j].span()));
  }
  return scores;
}

constexpr std::array kOptions = {kRequiredBudgetOption};

std::shared_ptr<const Policy> make(Options options) {
  return std::make_shared<KeySelection>(std::move(options), make, minus_norms);
}

}  // namespace

const PolicyInfo kKnorm = {
    "knorm",
    "keeps the keys of lowest norm",
    "L2 norm of keys, arXiv 2406.11430; NVIDIA/kvpress knorm_press.py",
    "Prefill only: decoding evicts nothing. Exact but for ties and rounding in float32. The lowest norms "
    "stay: a code that evicts them is the opposite. l2compress itself starts at 2048 tokens and leaves some "
    "layers out. Needs keys, no attention.",
    kOptions,
    make};

}  // namespace hae::reference
