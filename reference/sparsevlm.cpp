#include <algorithm>
#include <array>

#include "reference/budgeted_policy.hpp"
#include "reference/policies.hpp"
#include "reference/visual_pruning.hpp"
#include "sim/arithmetic.hpp"

// SparseVLM, arXiv 2410.04417: text tokens that the picture answers to rate the visual tokens at three
// layers.

namespace hae::reference {
namespace {

constexpr std::array kOptions = {
    OptionInfo{
        "raters", "attention", "attention or embedding",
        "text tokens above the mean in layer 0's attention to the picture, or in embedding similarity"},
    OptionInfo{"target", "192", "192, 128, 96 or 64",
               "mean over a model's layers of LLaVA's 576 visual tokens: chooses keep"},
    OptionInfo{"version", "1", "1 or 2", "which published table"},
    OptionInfo{"keep", "auto", "one count or share (0.5 or 50%) of the visual tokens a layer, as 300/200/110",
               "visual tokens that stay after each deciding layer; auto: from target and version"},
    deciding_layers_option("2/6/15"),
};

/// What the choice of raters goes by.
enum class RatedBy { attention, embedding };

class SparseVlm final : public BudgetedPolicy {
 public:
  SparseVlm(Options options, Rebuild rebuild, RatedBy rated_by, std::vector<Index> layers,
            std::vector<Amount> keep)
      : BudgetedPolicy(std::move(options), rebuild),
        rated_by_(rated_by),
        layers_(std::move(layers)),
        keep_(std::move(keep)) {}

  [[nodiscard]] Needs needs(const SequenceInfo& info, Index layer) const override {
    Needs needs;
    const bool by_attention = layer == 0 && rated_by_ == RatedBy::attention;
    needs.prompt_rows = by_attention || plan().decides(info, layer) ? PromptRows::text : PromptRows::none;
    needs.embedding_similarity = layer == 0 && rated_by_ == RatedBy::embedding;
    return needs;
  }
  [[nodiscard]] std::unique_ptr<Run> start(const SequenceInfo& info) const override;
  [[nodiscard]] bool prunes() const override { return true; }

  [[nodiscard]] VisualPruningPlan plan() const { return {.policy = given().name(), .layers = layers_}; }
  [[nodiscard]] RatedBy rated_by() const { return rated_by_; }

  /// What stays of so many visual tokens of the prompt.
  [[nodiscard]] Index kept(std::size_t stage, Index visual_tokens) const {
    return keep_[stage].of(visual_tokens);
  }

 private:
  RatedBy rated_by_;
  std::vector<Index> layers_;
  std::vector<Amount> keep_;
};

/// Raters are chosen among the prompt's text tokens after its first visual one, by m_t = what they have to do
/// with a visual token, on average: t rates iff m_t > mean of m (strict).
class SparseVlmRun final : public VisualPruningRun {
 public:
  SparseVlmRun(const SparseVlm& policy, const SequenceInfo& info)
      : VisualPruningRun(info, policy.plan()), policy_(policy) {
    for (Index j = 0; j < info.prompt; ++j) {
      (info.is_visual(j) ? visual_ : visual_.empty() ? before_ : text_).push_back(j);
    }
  }

  void begin_layer(Index layer, const LayerVectors& vectors) override {
    if (layer == 0 && policy_.rated_by() == RatedBy::embedding) {
      choose_raters(by_embedding(vectors.embedding_similarity));
    }
    VisualPruningRun::begin_layer(layer, vectors);
  }

  void observe(const Rows& rows) override {
    if (rows.layer() == 0 && policy_.rated_by() == RatedBy::attention) {
      rate(rows);
    }
    VisualPruningRun::observe(rows);
  }

  Decision prune(Index layer, const LayerCache& cache) override {
    Decision decision = VisualPruningRun::prune(layer, cache);
    if (layer == 0) {
      if (policy_.rated_by() == RatedBy::attention) {
        choose_raters(attention_);
      }
      if (!visual_.empty() && !text_.empty() && raters_.empty()) {
        decision.warnings.emplace_back(
            "sparsevlm: no text token is above the mean, so none rates the visual tokens and all are kept");
      }
    }
    return decision;
  }

 private:
  /// m_t = mean over visual tokens of layer 0's attention, over all query heads.
  void rate(const Rows& rows) {
    for (Index r = 0; r < rows.rows(); ++r) {
      if (!std::ranges::binary_search(text_, rows.query(r))) {
        continue;
      }
      const std::span<const double> a = rows.values({}, 0, r);
      double sum = 0.0;
      for (const Range& range : rows.visible(r)) {
        for (Index j = range.begin; j < range.end; ++j) {
          sum += info().is_visual(j) ? a[at(j)] : 0.0;
        }
      }
      attention_.push_back(sum / static_cast<double>(visual_.size()));
    }
  }

  /// m_t = mean over visual tokens v of softmax_t(x_v . x_t): weights by exp_nonpositive, sums in double.
  [[nodiscard]] std::vector<double> by_embedding(const View<const double, 2>& similarity) const {
    std::vector<double> mean(text_.size(), 0.0);
    std::vector<double> weights(text_.size());
    for (Index v = 0; v < similarity.extent(0) && !text_.empty(); ++v) {
      const std::span<const double> x = similarity[v].span().subspan(before_.size());
      const double largest = *std::ranges::max_element(x);
      double sum = 0.0;
      for (std::size_t t = 0; t < x.size(); ++t) {
        weights[t] = arithmetic::exp_nonpositive(static_cast<float>(x[t] - largest));
        sum += weights[t];
      }
      for (std::size_t t = 0; t < x.size(); ++t) {
        mean[t] += weights[t] / sum;
      }
    }
    for (double& m : mean) {
      m /= static_cast<double>(visual_.size());
    }
    return mean;
  }

  /// m  of the tokens of text_
  void choose_raters(const std::vector<double>& m) {
    double sum = 0.0;
    for (const double one : m) {
      sum += one;
    }
    for (std::size_t t = 0; t < m.size(); ++t) {
      if (m[t] > sum / static_cast<double>(m.size())) {
        raters_.push_back(text_[t]);
      }
    }
  }

  [[nodiscard]] bool scores(Index query) const override { return std::ranges::binary_search(raters_, query); }

  /// s_v = mean over the raters, also those that cannot see a later picture, of mean over query heads.
  [[nodiscard]] std::vector<Scored> choose(std::size_t stage, const std::vector<Index>& candidates,
                                           const TokenAttention& attention) const override {
    const auto count = static_cast<Index>(candidates.size());
    const Index kept = std::min(policy_.kept(stage, static_cast<Index>(visual_.size())), count - 1);
    std::vector<Scored> tokens;
    for (const Index v : candidates) {
      tokens.push_back({attention.sums[at(v)] / static_cast<double>(raters_.size()), v});
    }
    return select_lowest(std::move(tokens), count - kept);
  }

  const SparseVlm& policy_;
  std::vector<Index> before_;      ///< text before the first visual token, ascending
  std::vector<Index> visual_;      ///< of the prompt, ascending
  std::vector<Index> text_;        ///< after the first visual token, ascending
  std::vector<double> attention_;  ///< [text_] as far as their rows were seen
  std::vector<Index> raters_;      ///< ascending
};

std::unique_ptr<Run> SparseVlm::start(const SequenceInfo& info) const {
  return std::make_unique<SparseVlmRun>(*this, info);
}

/// The published counts of a target, or what was given.
std::vector<Amount> parse_keep(Options& options) {
  if (options.given("keep")) {
    options.exclude({"target", "version"}, "keep");
  } else {
    const Index column = options.choose<Index>("target", {{"192", 0}, {"128", 1}, {"96", 2}, {"64", 3}});
    using Table = std::array<const char*, 4>;
    const Table table =
        options.choose<Table>("version", {{"1", {"300/200/110", "303/110/36", "238/48/26", "66/30/17"}},
                                          {"2", {"300/200/118", "238/108/60", "246/54/28", "66/34/20"}}});
    options.resolve("keep", table[at(column)]);
  }
  std::vector<Amount> keep = options.amounts("keep");
  if (std::ranges::any_of(keep, &Amount::exceeds_whole)) {
    options.fail("keep");
  }
  return keep;
}

std::shared_ptr<const Policy> make(Options options) {
  const RatedBy rated_by = options.choose<RatedBy>(
      "raters", {{"attention", RatedBy::attention}, {"embedding", RatedBy::embedding}});
  std::vector<Index> layers = parse_deciding_layers(options, 0);
  if (rated_by == RatedBy::attention && layers.front() == 0) {
    options.fail("layers",
                 "must begin after layer 0, whose attention chooses the raters; or use raters=embedding");
  }
  std::vector<Amount> keep = parse_keep(options);
  if (keep.size() != layers.size()) {
    options.fail("keep", "has " + std::to_string(keep.size()) + " items for " +
                             std::to_string(layers.size()) + " layers; give one a layer");
  }
  return std::make_shared<SparseVlm>(std::move(options), make, rated_by, std::move(layers), std::move(keep));
}

}  // namespace

const PolicyInfo kSparseVlm = {
    "sparsevlm",
    "prunes visual tokens at three layers by the attention of the text tokens nearest to the picture",
    "SparseVLM, arXiv 2410.04417: its raters and its pruning at layers 2, 6 and 15",
    "Prefill only, online. raters=embedding is the published choice of raters, for traces that carry "
    "embedding similarities; raters=attention applies the same rule to layer 0's text-to-visual attention "
    "and is ours, as is choosing among the text after the first visual token. The counts kept are the "
    "published tables of versions 1 and 2; both leave at least one candidate out at every layer. Left out: "
    "version 1's recycling of pruned tokens, which merges; version 2's division by rotary logits and its "
    "choice of 14 heads. Counts are for LLaVA's 576 visual tokens; with fewer, give keep as shares. Any "
    "number of pictures makes one ranking. Needs the prompt's text rows of layer 0 (raters=attention) and of "
    "the deciding layers.",
    kOptions,
    make};

}  // namespace hae::reference
