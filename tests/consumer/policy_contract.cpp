#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "testing/register_policy_contract.hpp"

// Somebody else's policy and its contract: one that is right, and the mistakes that the contract is there
// for.

namespace {

using hae::Index;

enum class Mistake {
  none,
  remembers,
  counts_blocks,
  evicts_its_sink,
  shares_layers,
  uses_rows_it_does_not_ask_for
};

constexpr Index kBudget = 3;

/// What one layer knows: the attention that each token received. Of the residents before the newest the
/// lowest goes, the older one of equals, until the budget is met. The first token is a sink.
class Sums {
 public:
  Sums(Index tokens, bool evicts_its_sink) : sums_(hae::at(tokens), 0.0), first_(evicts_its_sink ? 0 : 1) {}

  void add(const hae::Rows& rows, Index row, double weight) {
    const auto values = rows.values({}, 0, row);
    for (Index token = 0; token <= rows.query(row); ++token) {
      sums_[hae::at(token)] += weight * values[hae::at(token)];
    }
  }

  hae::Decision lowest(Index layer, const hae::LayerCache& cache) const {
    std::vector<std::pair<double, Index>> order;
    for (Index token = first_; token + 1 < cache.joined(); ++token) {
      if (cache.is_resident(0, token)) {
        order.emplace_back(sums_[hae::at(token)], token);
      }
    }
    std::ranges::sort(order);
    hae::Decision decision;
    for (Index i = 0; i < cache.residents(0) - kBudget; ++i) {
      decision.evict.push_back(
          {.layer = layer, .token = order[hae::at(i)].second, .score = order[hae::at(i)].first});
    }
    return decision;
  }

 private:
  std::vector<double> sums_;
  Index first_;
};

class Decode final : public hae::LayerDecode {
 public:
  explicit Decode(std::shared_ptr<Sums> sums) : sums_(std::move(sums)) {}
  hae::Decision step(const hae::Rows& row, const hae::LayerCache& cache) override {
    sums_->add(row, 0, 1.0);
    return sums_->lowest(row.layer(), cache);
  }

 private:
  std::shared_ptr<Sums> sums_;
};

class LowestRun final : public hae::Run {
 public:
  LowestRun(const hae::SequenceInfo& info, Mistake mistake, double weight)
      : mistake_(mistake), weight_(weight) {
    const auto sums = [&] {
      return std::make_shared<Sums>(info.tokens, mistake == Mistake::evicts_its_sink);
    };
    const auto shared = sums();
    for (Index layer = 0; layer < info.layers; ++layer) {
      layers_.push_back(mistake == Mistake::shares_layers ? shared : sums());
    }
  }

  void observe(const hae::Rows& rows) override {
    for (Index row = 0; row < rows.rows(); ++row) {
      const bool is_weighty = mistake_ == Mistake::counts_blocks ? row == 0 : rows.query(row) == 1;
      layers_[hae::at(rows.layer())]->add(rows, row, is_weighty ? weight_ : 1.0);
    }
  }
  hae::Decision fit(Index layer, const hae::LayerCache& cache) override {
    return layers_[hae::at(layer)]->lowest(layer, cache);
  }
  std::unique_ptr<hae::LayerDecode> decode(Index layer) override {
    return std::make_unique<Decode>(layers_[hae::at(layer)]);
  }
  [[nodiscard]] hae::Limits limits(Index, Index) const override {
    return {.sinks = 1, .recent = 1, .budget = kBudget, .capacity = kBudget};
  }

 private:
  Mistake mistake_;
  double weight_;
  std::vector<std::shared_ptr<Sums>> layers_;
};

class Lowest final : public hae::Policy {
 public:
  explicit Lowest(Mistake mistake) : mistake_(mistake) {}
  [[nodiscard]] std::string spec() const override { return "lowest"; }
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> options() const override { return {}; }
  [[nodiscard]] hae::Needs needs(const hae::SequenceInfo&, Index) const override {
    return {mistake_ == Mistake::uses_rows_it_does_not_ask_for ? hae::PromptRows::text
                                                               : hae::PromptRows::all};
  }
  [[nodiscard]] std::unique_ptr<hae::Run> begin(const hae::SequenceInfo& info) const override {
    const double remembered = mistake_ == Mistake::remembers ? 9.0 * begun_ : 0.0;
    const double weight = mistake_ == Mistake::counts_blocks ? 9.0 : 1.0 + remembered;
    auto run = std::make_unique<LowestRun>(info, mistake_, weight);
    ++begun_;
    return run;
  }

 private:
  Mistake mistake_;
  mutable double begun_ = 0.0;  // what a policy must not have
};

Mistake mistake_named(const std::string& name) {
  const std::vector<std::pair<std::string, Mistake>> all = {
      {"none", Mistake::none},
      {"remembers", Mistake::remembers},
      {"counts_blocks", Mistake::counts_blocks},
      {"evicts_its_sink", Mistake::evicts_its_sink},
      {"shares_layers", Mistake::shares_layers},
      {"uses_rows_it_does_not_ask_for", Mistake::uses_rows_it_does_not_ask_for}};
  return std::ranges::find(all, name, &std::pair<std::string, Mistake>::first)->second;
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const Mistake mistake = mistake_named(argv[argc - 1]);
  hae::testing::register_policy_contract("Lowest", [=] { return std::make_shared<Lowest>(mistake); });
  return RUN_ALL_TESTS();
}
