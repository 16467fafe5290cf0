#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "reference/budgeted_policy.hpp"
#include "reference/policies.hpp"
#include "reference/visual_pruning.hpp"

// FastV, arXiv 2403.06764: from layer K on, only the visual tokens that layer K - 1 attends to most. Its text
// averages over query rows; its code takes the last one.

namespace hae::reference {
namespace {

constexpr std::array kOptions = {
    OptionInfo{"layer", "2", "a count of 1 or more, at most the model's layers",
               "K: the first layer without the pruned tokens; layer K-1 scores them"},
    OptionInfo{"keep", "-", "a count of 1 or more, or a share (0.5 or 50%) of the visual tokens",
               "visual tokens that stay; required"},
    OptionInfo{"rounding", "down", "down or original",
               "a share rounds down, at least 1; or to the nearest number, half to even, as in FastV's code"},
    OptionInfo{"scope", "sequence", "sequence or image", "keep of all pictures together, or of each"},
    OptionInfo{"effect", "within", "within or after",
               "later layers never see the pruned tokens, or lose them when their prefill is over"},
};

/// Which prompt rows score the visual tokens.
enum class Scorer { last_row, text_mean };

class FastV final : public BudgetedPolicy {
 public:
  FastV(Options options, Rebuild rebuild, Scorer scorer)
      : BudgetedPolicy(std::move(options), rebuild),
        scorer_(scorer),
        layer_(given().count("layer", 1)),
        keep_(parse_keep()),
        rounds_(given().choose<bool>("rounding", {{"down", false}, {"original", true}})),
        per_image_(given().choose<bool>("scope", {{"sequence", false}, {"image", true}})),
        effect_(given().choose<Effect>("effect", {{"within", Effect::within}, {"after", Effect::after}})) {}

  [[nodiscard]] Needs needs(const SequenceInfo& info, Index layer) const override {
    if (!plan().decides(info, layer)) {
      return {};
    }
    return scorer_ == Scorer::text_mean ? Needs{PromptRows::text} : Needs{.newest_prompt_rows = 1};
  }
  [[nodiscard]] std::unique_ptr<Run> start(const SequenceInfo& info) const override;
  [[nodiscard]] bool prunes() const override { return true; }

  [[nodiscard]] VisualPruningPlan plan() const { return {given().name(), {layer_ - 1}, effect_}; }
  [[nodiscard]] Scorer scorer() const { return scorer_; }
  [[nodiscard]] bool per_image() const { return per_image_; }

  /// Of so many visual tokens, how many stay.
  [[nodiscard]] Index kept(Index tokens) const {
    if (const std::optional<Fraction> share = keep_.share(); rounds_ && share) {
      const double whole = static_cast<double>(share->numerator) * static_cast<double>(tokens);
      return static_cast<Index>(std::nearbyint(whole / static_cast<double>(share->denominator)));
    }
    return std::min(tokens, keep_.of(tokens));
  }

 private:
  [[nodiscard]] Amount parse_keep() const {
    if (!given().given("keep")) {
      given().fail("keep", "is required; give a count or a share of the visual tokens");
    }
    const Amount keep = given().amount("keep");
    if (keep.exceeds_whole()) {
      given().fail("keep");
    }
    if (given().given("rounding") && keep.tokens()) {
      given().fail("rounding", "has no meaning with a count; give keep as a share, or leave it out");
    }
    return keep;
  }

  Scorer scorer_;
  Index layer_;
  Amount keep_;
  bool rounds_;
  bool per_image_;
  Effect effect_;
};

class FastVRun final : public VisualPruningRun {
 public:
  FastVRun(const FastV& policy, const SequenceInfo& info)
      : VisualPruningRun(info, policy.plan()), policy_(policy) {}

 private:
  [[nodiscard]] bool scores(Index query) const override {
    return policy_.scorer() == Scorer::text_mean ? VisualPruningRun::scores(query)
                                                 : query == info().prompt - 1;
  }

  [[nodiscard]] std::vector<Scored> choose(std::size_t /*stage*/, const std::vector<Index>& candidates,
                                           const TokenAttention& attention) const override {
    std::map<Index, std::vector<Scored>> scopes;
    for (const Index j : candidates) {
      const double mean = attention.sums[at(j)] / static_cast<double>(attention.rows[at(j)]);
      scopes[policy_.per_image() ? info().image[at(j)] : 0].push_back({mean, j});
    }
    std::vector<Scored> chosen;
    for (auto& [scope, tokens] : scopes) {
      const auto count = static_cast<Index>(tokens.size());
      const std::vector<Scored> lowest = select_lowest(std::move(tokens), count - policy_.kept(count));
      chosen.insert(chosen.end(), lowest.begin(), lowest.end());
    }
    return chosen;
  }

  const FastV& policy_;
};

std::unique_ptr<Run> FastV::start(const SequenceInfo& info) const {
  if (layer_ > info.layers) {
    throw ConfigError("policy '" + spec() + "': sequence '" + info.name + "', layer " +
                      std::to_string(layer_) + ": the model has " + std::to_string(info.layers) +
                      " layers; choose layer=K from 1 to " + std::to_string(info.layers));
  }
  return std::make_unique<FastVRun>(*this, info);
}

template <Scorer scorer>
std::shared_ptr<const Policy> make(Options options) {
  return std::make_shared<FastV>(std::move(options), make<scorer>, scorer);
}

}  // namespace

const PolicyInfo kFastV = {
    "fastv",
    "prunes visual tokens from layer K on by the last prompt row's attention in layer K-1",
    "FastV, arXiv 2403.06764, as its code for a KV cache computes it (fastv_kvcache.py)",
    "Prefill only, online: the variant that decides once and keeps the cache. Score: mean over query heads "
    "of the last prompt row of layer K-1. K = 0, which picks tokens at random, is left out. A share rounds "
    "down, at least 1; rounding=original gives FastV's count. Keeping per picture, and tokens that the row "
    "cannot see because of a sliding window (kept), are ours. Needs the last prompt row of layer K-1.",
    kOptions,
    make<Scorer::last_row>};

const PolicyInfo kFastVTextMean = {
    "fastv/text-mean",
    "prunes visual tokens from layer K on by the mean attention of prompt text in layer K-1",
    "FastV, arXiv 2403.06764, as its text describes it",
    "Prefill only, online: as fastv, but a token's score is the mean over the prompt text rows that can see "
    "it. Needs the prompt's text rows of layer K-1.",
    kOptions,
    make<Scorer::text_mean>};

}  // namespace hae::reference
