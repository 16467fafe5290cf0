#include <array>

#include "reference/budgeted_policy.hpp"
#include "reference/policies.hpp"
#include "reference/visual_pruning.hpp"

// MustDrop, arXiv 2411.10803: a filter with two thresholds at some layers of the prefill; while decoding, no
// layer holds what the filter dropped.

namespace hae::reference {
namespace {

constexpr std::array kOptions = {
    OptionInfo{"target", "192", "192, 128 or 64",
               "about how many of LLaVA's 576 visual tokens stay: chooses both thresholds"},
    OptionInfo{"tau_global", "auto", "a number of 0 or more",
               "drop below this share of the summed visual attention (strict), and; auto: from target"},
    OptionInfo{"tau_individual", "auto", "a number of 0 or more",
               "below this attention in every text row (strict); auto: from target"},
    deciding_layers_option("2/6/10/14"),
};

struct Thresholds {
  double global;
  double individual;
};

class MustDrop final : public BudgetedPolicy {
 public:
  MustDrop(Options options, Rebuild rebuild, Thresholds thresholds, std::vector<Index> layers)
      : BudgetedPolicy(std::move(options), rebuild), thresholds_(thresholds), layers_(std::move(layers)) {}

  [[nodiscard]] Needs needs(const SequenceInfo& info, Index layer) const override {
    return {plan().decides(info, layer) ? PromptRows::text : PromptRows::none};
  }
  [[nodiscard]] std::unique_ptr<Run> start(const SequenceInfo& info) const override;
  [[nodiscard]] bool prunes() const override { return true; }

  [[nodiscard]] VisualPruningPlan plan() const {
    return {.policy = given().name(), .layers = layers_, .clears_earlier_layers = true};
  }
  [[nodiscard]] const Thresholds& thresholds() const { return thresholds_; }

 private:
  Thresholds thresholds_;
  std::vector<Index> layers_;
};

class MustDropRun final : public VisualPruningRun {
 public:
  MustDropRun(const MustDrop& policy, const SequenceInfo& info)
      : VisualPruningRun(info, policy.plan()), thresholds_(policy.thresholds()) {}

 private:
  [[nodiscard]] std::vector<Scored> choose(std::size_t /*stage*/, const std::vector<Index>& candidates,
                                           const TokenAttention& attention) const override {
    double total = 0.0;
    for (const Index v : candidates) {
      total += attention.sums[at(v)];
    }
    const double least = thresholds_.global * total;
    std::vector<Scored> chosen;
    for (const Index v : candidates) {
      if (attention.sums[at(v)] < least && attention.largest[at(v)] < thresholds_.individual) {
        chosen.push_back({attention.sums[at(v)], v});
      }
    }
    return chosen;
  }

  Thresholds thresholds_;
};

std::unique_ptr<Run> MustDrop::start(const SequenceInfo& info) const {
  return std::make_unique<MustDropRun>(*this, info);
}

/// The published pair of a target, or a pair that was given.
Thresholds parse_thresholds(Options& options) {
  if (!options.given("tau_global") && !options.given("tau_individual")) {
    using Pair = std::pair<const char*, const char*>;
    const auto [global, individual] = options.choose<Pair>(
        "target", {{"192", {"0.001", "0.001"}}, {"128", {"0.0012", "0.001"}}, {"64", {"0.011", "0.01"}}});
    options.resolve("tau_global", global);
    options.resolve("tau_individual", individual);
  } else {
    for (const auto& [key, other] :
         {std::pair{"tau_global", "tau_individual"}, {"tau_individual", "tau_global"}}) {
      if (!options.given(key)) {
        options.fail(key, "is required beside " + std::string(other) + "; give both, or target");
      }
    }
    options.exclude({"target"}, "tau_global and tau_individual");
  }
  return {options.threshold("tau_global"), options.threshold("tau_individual")};
}

std::shared_ptr<const Policy> make(Options options) {
  const Thresholds thresholds = parse_thresholds(options);
  std::vector<Index> layers = parse_deciding_layers(options, 0);
  return std::make_shared<MustDrop>(std::move(options), make, thresholds, std::move(layers));
}

}  // namespace

const PolicyInfo kMustDrop = {
    "mustdrop",
    "drops visual tokens below two thresholds at some layers of the prefill, then from every layer's cache",
    "MustDrop, arXiv 2411.10803: its dual attention filter and its decoding stage",
    "Prefill only, online: layers after the deciding one never see a dropped token, the others lose it when "
    "the prefill is over. Left out is the vision encoder's stage, which a decoder's trace does not hold: "
    "nothing is merged there and no set of key tokens is spared. Any number of pictures makes one sum. May "
    "drop nothing, or all, which is warned of. A short model has fewer deciding layers: a warning says "
    "which, layers= chooses others. Needs the prompt's text rows of the deciding layers.",
    kOptions,
    make};

}  // namespace hae::reference
