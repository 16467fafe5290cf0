#include <algorithm>
#include <array>

#include "reference/budgeted_policy.hpp"
#include "reference/draws.hpp"
#include "reference/keep_everything.hpp"
#include "reference/policies.hpp"
#include "reference/random.hpp"
#include "reference/shared_options.hpp"
#include "sim/row_kernels.hpp"

namespace hae::reference {
namespace {

constexpr std::array kOptions = {
    kRequiredBudgetOption,
    kStreamSinksOption,
    kTenRecentOption,
    OptionInfo{"proxies", "8", "a count of 1 or more", "q: the last prompt rows, whose attention is summed"},
    OptionInfo{"random", "0.2",
               "a count of 0 or more, or a share (0.2 or 20%) of the budget beside sinks and recent",
               "m2: how many of the tokens that stay are drawn"},
    OptionInfo{"temperature", "1", "a number of 0 or more",
               "T: drawn with probability softmax(S/T); 0: all equally likely"},
    kSeedOption,
    kHeadLaneOption,
    kGroupOption,
};

struct NaclOptions {
  Reduction reduction;
  Index sinks;
  Index recent;
  Index proxies;
  std::optional<Amount> drawn;  ///< m2; none: no token is drawn
  double temperature;
  std::uint64_t seed;
};

std::optional<Amount> parse_drawn(const Options& options) {
  if (options.text("random") == "0") {
    return std::nullopt;
  }
  const Amount drawn = options.amount("random");
  if (drawn.exceeds_whole()) {
    options.fail("random");
  }
  return drawn;
}

class Nacl final : public BudgetedPolicy {
 public:
  Nacl(Options options, Rebuild rebuild)
      : BudgetedPolicy(std::move(options), rebuild), nacl_{parse_head_reduction(given()),
                                                           given().count("sinks", 0),
                                                           given().count("recent", 0),
                                                           given().count("proxies", 1),
                                                           parse_drawn(given()),
                                                           given().threshold("temperature"),
                                                           given().seed("seed")} {}

  [[nodiscard]] LaneKind lanes() const override { return nacl_.reduction.lanes; }
  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override {
    return {.newest_prompt_rows = nacl_.proxies};
  }
  [[nodiscard]] std::unique_ptr<Run> start(const SequenceInfo& info) const override;

  [[nodiscard]] std::optional<Limits> limits_under(const SequenceInfo& /*info*/, Index /*layer*/,
                                                   Index budget) const override {
    return drawn(budget) ? std::optional(limits(budget)) : std::nullopt;
  }
  [[nodiscard]] Limits limits(Index budget) const {
    return {
        .sinks = nacl_.sinks, .recent = nacl_.recent, .budget = budget, .capacity = budget, .grows = true};
  }

  [[nodiscard]] Index fitted(const SequenceInfo& info) const { return budget()->of(info.prompt); }

  /// m2; none if protected and drawn tokens exceed the budget.
  [[nodiscard]] std::optional<Index> drawn(Index budget) const {
    const Index open = budget - nacl_.sinks - nacl_.recent;
    if (open < 0) {
      return std::nullopt;
    }
    if (!nacl_.drawn || (open == 0 && !nacl_.drawn->tokens())) {
      return 0;
    }
    const Index drawn = nacl_.drawn->of(open);
    return drawn > open ? std::nullopt : std::optional(drawn);
  }
  [[nodiscard]] const NaclOptions& nacl() const { return nacl_; }

 private:
  NaclOptions nacl_;
};

class NaclRun final : public Run {
 public:
  NaclRun(const Nacl& policy, const SequenceInfo& info)
      : policy_(policy), options_(policy.nacl()), info_(info), budget_(policy.fitted(info)) {
    if (!policy.drawn(budget_)) {
      throw ConfigError("policy '" + policy.spec() + "': sequence '" + info.name +
                        "', layer 0: sinks + recent + random exceed the budget of " +
                        std::to_string(budget_) + " tokens; raise the budget, or protect or draw fewer");
    }
  }

  void begin_layer(Index /*layer*/, const LayerVectors& /*vectors*/) override {
    sums_.assign(at(lane_count(info_, options_.reduction.lanes)),
                 std::vector<double>(at(kernels::padded(info_.tokens)), 0.0));
  }

  void observe(const Rows& rows) override {
    for (Index r = 0; r < rows.rows(); ++r) {
      if (rows.query(r) < info_.prompt - options_.proxies) {
        continue;
      }
      for (std::size_t lane = 0; lane < sums_.size(); ++lane) {
        const auto values = rows.values(options_.reduction, static_cast<Index>(lane), r);
        kernels::add(values.data(), sums_[lane].data(), static_cast<Index>(values.size()));
      }
    }
  }

  Decision fit(Index layer, const LayerCache& cache) override {
    Decision decision;
    for (Index lane = 0; lane < cache.lanes(); ++lane) {
      for (const Scored& gone : undrawn(cache, layer, lane)) {
        decision.evict.push_back({layer, lane, gone.token, gone.score});
      }
    }
    return decision;
  }

  std::unique_ptr<LayerDecode> decode(Index /*layer*/) override { return std::make_unique<KeepEverything>(); }

  [[nodiscard]] Limits limits(Index /*layer*/, Index /*lane*/) const override {
    return policy_.limits(budget_);
  }

 private:
  /// The tokens that neither their sum nor a draw keeps, with the score of the last of the two rankings.
  [[nodiscard]] std::vector<Scored> undrawn(const LayerCache& cache, Index layer, Index lane) const {
    const Index excess = cache.residents(lane) - budget_;
    if (excess <= 0) {
      return {};
    }
    std::vector<Scored> scored;
    for (const Index token : eligible(cache, lane, options_.sinks, options_.recent)) {
      scored.push_back({sums_[at(lane)][at(token)], token});
    }
    const Index drawn = *policy_.drawn(budget_);
    std::vector<Scored> rest = select_lowest(std::move(scored), excess + drawn);
    if (drawn == 0) {
      return rest;
    }
    for (Scored& token : rest) {
      const double logit = options_.temperature > 0.0 ? token.score / options_.temperature : 0.0;
      token.score = logit + gumbel(random_priority(options_.seed, layer, lane, token.token));
    }
    return select_lowest(std::move(rest), excess);
  }

  const Nacl& policy_;
  const NaclOptions& options_;
  const SequenceInfo& info_;
  Index budget_;
  std::vector<std::vector<double>> sums_;  ///< [lanes][padded T] of the layer in its prefill
};

std::unique_ptr<Run> Nacl::start(const SequenceInfo& info) const {
  require_budget();
  return std::make_unique<NaclRun>(*this, info);
}

std::shared_ptr<const Policy> make(Options options) {
  return std::make_shared<Nacl>(std::move(options), make);
}

}  // namespace

const PolicyInfo kNacl = {
    "nacl",
    "keeps the tokens that the last prompt rows attend to most, and some at random",
    "NACL, arXiv 2408.03675; the form of KVCache-Factory (nacl.py) with suffix proxies",
    "Prefill only: decoding adds tokens. Exact: sinks, recent tokens, the largest proxy sums, then m2 of the "
    "rest drawn without replacement with probability softmax(S/T). Draws are ours: one fixed number a (seed, "
    "layer, lane, token), largest S/T + Gumbel first, which is the same distribution; report several seeds. "
    "The log shows that number, or the sum with random=0. Proxies are causal rows of the trace, where the "
    "official code, by our reading, drops the mask among them; prefix and edge proxies are not here, since "
    "causal rows at the start say nothing of later keys. The defaults of proxies and random are ours. Needs "
    "the last q prompt rows.",
    kOptions,
    make};

}  // namespace hae::reference
