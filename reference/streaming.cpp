#include <array>

#include "reference/policies.hpp"
#include "reference/shared_options.hpp"
#include "reference/window.hpp"

namespace hae::reference {
namespace {

constexpr auto kOptions = concatenate(
    kWindowOptions,
    std::array{OptionInfo{"positions", "original", "original or cache",
                          "keys as they were recorded, or moved to their place in the cache: refused"}});

/// StreamingLLM with positions of the cache. It cannot run on what traces carry.
class RebasedStreaming final : public BudgetedPolicy {
 public:
  using BudgetedPolicy::BudgetedPolicy;

  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override { return {}; }
  [[nodiscard]] bool budget_is_open() const override { return false; }
  [[nodiscard]] std::unique_ptr<Run> start(const SequenceInfo& info) const override {
    throw NeedsError("sequence '" + info.name +
                     "' lacks queries and keys before rotary embedding, which "
                     "policy '" +
                     spec() +
                     "' needs to move keys to their places in the cache; choose "
                     "positions=original");
  }
};

std::shared_ptr<const Policy> make(Options options) {
  std::shared_ptr<const BudgetedPolicy> window = make_window(options, make);
  if (options.choose<bool>("positions", {{"original", false}, {"cache", true}})) {
    return std::make_shared<RebasedStreaming>(std::move(options), make);
  }
  return window;
}

}  // namespace

const PolicyInfo kStreaming = {
    "streaming",
    "StreamingLLM: keeps the first tokens and the newest ones",
    "StreamingLLM, arXiv 2309.17453; the official streaming_llm/kv_cache.py",
    "Online. The tokens are exact: the first s and the last r stay when there are more; it evicts what "
    "window evicts, with the same code. The original makes room before a token joins, so its rows see s + r "
    "tokens and here, as of every policy, one more: its r is r - 1 here. Attention is an analogue: the "
    "original gives keys the positions of their places in the cache (positions=cache), which would need "
    "queries and keys before rotary embedding, so that is refused. Needs no attention.",
    kOptions,
    make};

}  // namespace hae::reference
