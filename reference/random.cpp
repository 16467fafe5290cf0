#include "reference/random.hpp"

#include <algorithm>
#include <array>

#include "reference/budgeted_policy.hpp"
#include "reference/policies.hpp"
#include "reference/selection.hpp"
#include "reference/shared_options.hpp"

namespace hae::reference {
namespace {

constexpr std::array kOptions = {
    kRequiredBudgetOption,
    OptionInfo{"seed", "0", "a whole number of 0 or more", "which random order"},
    OptionInfo{"lane", "layer", "layer or kv_head", "what evicts on its own"},
};

std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

/// Evicts residents of every lane in the order of their priority until `budget` are left.
Decision evict_down_to(const LayerCache& cache, Index layer, Index budget, std::uint64_t seed) {
  Decision decision;
  for (Index lane = 0; lane < cache.lanes(); ++lane) {
    if (cache.residents(lane) <= budget) {
      continue;
    }
    std::vector<std::pair<std::uint64_t, Index>> order;
    for (const Index token : eligible(cache, lane, 0, 0)) {
      order.emplace_back(random_priority(seed, layer, lane, token), token);
    }
    const auto excess = cache.residents(lane) - budget;
    std::partial_sort(order.begin(), order.begin() + excess, order.end());
    for (Index i = 0; i < excess; ++i) {
      decision.evict.push_back({layer, lane, order[static_cast<std::size_t>(i)].second, std::nullopt});
    }
  }
  return decision;
}

class RandomDecode final : public LayerDecode {
 public:
  RandomDecode(Index budget, std::uint64_t seed) : budget_(budget), seed_(seed) {}

  Decision step(const Rows& row, const LayerCache& cache) override {
    return evict_down_to(cache, row.layer(), budget_, seed_);
  }

 private:
  Index budget_;
  std::uint64_t seed_;
};

class Random final : public BudgetedPolicy {
 public:
  Random(Options options, Rebuild rebuild)
      : BudgetedPolicy(std::move(options), rebuild),
        lanes_(parse_lane(given())),
        seed_(given().seed("seed")) {}

  [[nodiscard]] LaneKind lanes() const override { return lanes_; }
  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override { return {}; }
  [[nodiscard]] std::unique_ptr<Run> start(const SequenceInfo& info) const override;

  [[nodiscard]] std::optional<Limits> limits_under(const SequenceInfo& /*info*/, Index /*layer*/,
                                                   Index budget) const override {
    return Limits{.budget = budget, .capacity = budget};
  }

  [[nodiscard]] std::uint64_t seed() const { return seed_; }
  [[nodiscard]] Index fitted(const SequenceInfo& info) const { return budget()->of(info.prompt); }

 private:
  LaneKind lanes_;
  std::uint64_t seed_;
};

class RandomRun final : public Run {
 public:
  RandomRun(const Random& policy, const SequenceInfo& info)
      : budget_(policy.fitted(info)), seed_(policy.seed()) {}

  Decision fit(Index layer, const LayerCache& cache) override {
    return evict_down_to(cache, layer, budget_, seed_);
  }
  std::unique_ptr<LayerDecode> decode(Index /*layer*/) override {
    return std::make_unique<RandomDecode>(budget_, seed_);
  }
  [[nodiscard]] Limits limits(Index /*layer*/, Index /*lane*/) const override {
    return {.budget = budget_, .capacity = budget_};
  }

 private:
  Index budget_;
  std::uint64_t seed_;
};

std::unique_ptr<Run> Random::start(const SequenceInfo& info) const {
  require_budget();
  return std::make_unique<RandomRun>(*this, info);
}

std::shared_ptr<const Policy> make(Options options) {
  return std::make_shared<Random>(std::move(options), make);
}

}  // namespace

std::uint64_t random_priority(std::uint64_t seed, Index layer, Index lane, Index token) {
  const auto bits = [](Index i) { return static_cast<std::uint64_t>(i); };
  return mix(mix(mix(mix(seed) ^ bits(layer)) ^ bits(lane)) ^ bits(token));
}

const PolicyInfo kRandom = {
    "random",
    "evicts in a fixed random order",
    "a control",
    "Online. Every (layer, lane, token) has one priority, so the kept set is a uniform sample. No token is "
    "protected. Report several seeds. Needs no attention.",
    kOptions,
    make};

}  // namespace hae::reference
