#include <algorithm>
#include <array>

#include "reference/lane_sizes.hpp"
#include "reference/policies.hpp"
#include "reference/selection.hpp"
#include "reference/shared_options.hpp"

namespace hae::reference {
namespace {

constexpr std::array kOptions = {
    OptionInfo{"sinks", "4", "a count of 0 or more", "positions 0 .. sinks-1 are never evicted"},
    OptionInfo{"recent", "-", "a count of 0 or more",
               "newest residents that stay; this or a budget, unless it is matched"},
    OptionInfo{"budget", "-", "a count of 1 or more, at least sinks",
               "residents a lane holds: recent = budget - sinks"},
};

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

class WindowRun final : public Run {
 public:
  explicit WindowRun(const Limits& limits) : limits_(limits) {}

  Decision fit(Index layer, const LayerCache& cache) override { return leave_window(cache, layer, limits_); }
  std::unique_ptr<LayerDecode> decode(Index /*layer*/) override {
    return std::make_unique<WindowDecode>(limits_);
  }
  [[nodiscard]] Limits limits(Index /*layer*/) const override { return limits_; }

 private:
  Limits limits_;
};

class Window final : public Policy {
 public:
  explicit Window(Options options) : options_(std::move(options)), sinks_(options_.count("sinks", 0)) {
    if (options_.given("recent") && sinks_ == 0 && options_.count("recent", 0) == 0) {
      options_.fail("recent", "and sinks are both 0, so that nothing would stay; keep at least one token");
    }
    if (options_.given("recent") && options_.given("budget")) {
      options_.fail("budget", "and recent were both given; give one of them");
    }
    if (options_.given("recent")) {
      recent_ = options_.count("recent", 0);
    } else if (const std::optional<Index> budget = parse_budget(options_)) {
      recent_ = *budget - sinks_;
      if (*recent_ < 0) {
        options_.fail("budget");
      }
    }
  }

  [[nodiscard]] std::string spec() const override { return options_.canonical(); }
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> options() const override {
    return options_.all();
  }
  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override { return {}; }

  [[nodiscard]] std::unique_ptr<Run> begin(const SequenceInfo& /*info*/) const override {
    if (!recent_) {
      options_.fail("recent", "or budget is required; give one, or match the budget with --match");
    }
    return std::make_unique<WindowRun>(
        Limits{sinks_, *recent_, sinks_ + *recent_, std::nullopt, sinks_ + *recent_});
  }

  [[nodiscard]] bool budget_is_open() const override {
    return !options_.given("recent") && !options_.given("budget");
  }

  [[nodiscard]] std::shared_ptr<const Policy> with_budget(Index budget) const override {
    HAE_EXPECTS(budget_is_open());
    Options options = options_;
    options.resolve("budget", std::to_string(budget));
    return std::make_shared<Window>(std::move(options));
  }

  [[nodiscard]] std::optional<LaneSizes> sizes(Index budget, Index residents, Index steps) const override {
    return budget < sinks_ ? std::nullopt : std::optional(sizes_at_budget(budget, residents, steps));
  }

 private:
  Options options_;
  Index sinks_;
  std::optional<Index> recent_;
};

std::shared_ptr<const Policy> make(Options options) {
  return std::make_shared<Window>(std::move(options));
}

}  // namespace

const PolicyInfo kWindow = {"window",
                            "keeps the first tokens and the newest ones",
                            "a control; the cache of StreamingLLM, arXiv 2309.17453, with original positions",
                            "Online. Positions are never renumbered. Needs no attention.",
                            kOptions,
                            make};

}  // namespace hae::reference
