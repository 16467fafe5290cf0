#include "reference/window.hpp"

#include <algorithm>

#include "reference/lane_sizes.hpp"
#include "reference/policies.hpp"
#include "reference/selection.hpp"
#include "reference/shared_options.hpp"

namespace hae::reference {
namespace {

/// What leaves a window: residents that are neither sinks nor among the newest.
Decision leave_window(const LayerCache& cache, Index layer, const Limits& limits) {
  Decision decision;
  for (const Index token : eligible(cache, 0, limits.sinks, limits.recent)) {
    decision.evict.push_back({layer, 0, token, std::nullopt});
  }
  return decision;
}

class WindowDecode final : public LayerDecode {
 public:
  explicit WindowDecode(const Limits& limits) : limits_(limits) {}

  Decision step(const Rows& row, const LayerCache& cache) override {
    return leave_window(cache, row.layer(), limits_);
  }

 private:
  Limits limits_;
};

class Window final : public BudgetedPolicy {
 public:
  Window(Options options, Rebuild rebuild)
      : BudgetedPolicy(std::move(options), rebuild), sinks_(given().count("sinks", 0)) {
    if (budget() && budget()->tokens() && *budget()->tokens() < sinks_) {
      given().fail("budget");
    }
    if (given().given("recent")) {
      recent_ = given().count("recent", 0);
      if (sinks_ + *recent_ == 0) {
        given().fail("recent", "and sinks are both 0, so that nothing would stay; keep at least one token");
      }
      if (given().given("budget")) {
        given().fail("budget", "and recent were both given; give one of them");
      }
    }
  }

  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override { return {}; }
  [[nodiscard]] std::unique_ptr<Run> begin(const SequenceInfo& info) const override;
  [[nodiscard]] bool budget_is_open() const override { return !recent_ && BudgetedPolicy::budget_is_open(); }

  [[nodiscard]] std::optional<LaneSizes> sizes(const SequenceInfo& info, Index /*layer*/, Index budget,
                                               Index residents) const override {
    return budget < sinks_ ? std::nullopt : std::optional(sizes_at_budget(budget, residents, info.steps()));
  }

  /// Sinks and newest tokens that stay.
  [[nodiscard]] Index fitted(const SequenceInfo& info) const {
    const Index total = recent_ ? sinks_ + *recent_ : budget()->of(info.prompt);
    if (total < sinks_) {
      throw ConfigError("policy '" + spec() + "': sequence '" + info.name +
                        "', layer 0: sinks = " + std::to_string(sinks_) + " exceeds the budget of " +
                        std::to_string(total) + " tokens; raise the budget or protect fewer");
    }
    return total;
  }
  [[nodiscard]] Index sinks() const { return sinks_; }

 private:
  Index sinks_;
  std::optional<Index> recent_;
};

class WindowRun final : public Run {
 public:
  WindowRun(const Window& policy, const SequenceInfo& info) : info_(info) {
    const Index total = policy.fitted(info);
    limits_ = {.sinks = policy.sinks(), .recent = total - policy.sinks(), .budget = total, .capacity = total};
  }

  Decision fit(Index layer, const LayerCache& cache) override {
    Decision decision = leave_window(cache, layer, limits_);
    warn_above_window(info_, layer, *limits_.budget, decision);
    return decision;
  }
  std::unique_ptr<LayerDecode> decode(Index /*layer*/) override {
    return std::make_unique<WindowDecode>(limits_);
  }
  [[nodiscard]] Limits limits(Index /*layer*/, Index /*lane*/) const override { return limits_; }

 private:
  const SequenceInfo& info_;
  Limits limits_;
};

std::unique_ptr<Run> Window::begin(const SequenceInfo& info) const {
  if (!recent_ && !budget()) {
    given().fail("recent", "or budget is required; give one, or match the budget with --match");
  }
  return std::make_unique<WindowRun>(*this, info);
}

std::shared_ptr<const Policy> make(Options options) {
  return make_window(std::move(options), make);
}

}  // namespace

std::shared_ptr<const BudgetedPolicy> make_window(Options options, BudgetedPolicy::Rebuild rebuild) {
  return std::make_shared<Window>(std::move(options), rebuild);
}

const PolicyInfo kWindow = {"window",
                            "keeps the first tokens and the newest ones",
                            "a control; the cache of StreamingLLM, arXiv 2309.17453, with original positions",
                            "Online. Positions are never renumbered. Needs no attention.",
                            kWindowOptions,
                            make};

}  // namespace hae::reference
