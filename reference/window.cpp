#include "reference/window.hpp"

#include "reference/policies.hpp"
#include "reference/sliding_window.hpp"

namespace hae::reference {
namespace {

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
  [[nodiscard]] std::unique_ptr<Run> start(const SequenceInfo& info) const override;
  [[nodiscard]] bool budget_is_open() const override { return !recent_ && BudgetedPolicy::budget_is_open(); }

  [[nodiscard]] std::optional<Limits> limits_under(const SequenceInfo& /*info*/, Index /*layer*/,
                                                   Index budget) const override {
    return budget < sinks_ ? std::nullopt : std::optional(limits(budget));
  }
  [[nodiscard]] Limits limits(Index budget) const {
    return {.sinks = sinks_, .recent = budget - sinks_, .budget = budget, .capacity = budget};
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

 private:
  Index sinks_;
  std::optional<Index> recent_;
};

class WindowRun final : public Run {
 public:
  explicit WindowRun(const Limits& limits) : limits_(limits) {}

  Decision fit(Index layer, const LayerCache& cache) override { return leave_window(cache, layer, limits_); }
  std::unique_ptr<LayerDecode> decode(Index /*layer*/) override {
    return std::make_unique<WindowDecode>(limits_);
  }
  [[nodiscard]] Limits limits(Index /*layer*/, Index /*lane*/) const override { return limits_; }

 private:
  Limits limits_;
};

std::unique_ptr<Run> Window::start(const SequenceInfo& info) const {
  if (!recent_ && !budget()) {
    given().fail("recent", "or budget is required; give one, or match the budget with --match");
  }
  return std::make_unique<WindowRun>(limits(fitted(info)));
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
