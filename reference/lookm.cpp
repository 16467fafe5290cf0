#include <algorithm>
#include <map>

#include "reference/policies.hpp"
#include "reference/selection.hpp"
#include "reference/similar_keys.hpp"
#include "reference/snapkv_scores.hpp"

namespace hae::reference {
namespace {

enum class Merging { none, mean, weighted, pivot };

/// The weights by which m evicted tokens and the one that they go into become one vector:
///
///   mean      (x + Σ x_e) / (1 + m)
///   weighted  (x + Σ cos(k_e, k) x_e) / (1 + m)
///   pivot     (x + Σ (x_e + x)/2) / (1 + m)
Merge merge_of(Merging merging, const Neighbour& neighbour, Index merged) {
  const auto m = static_cast<double>(merged);
  const double share = 1.0 / (1.0 + m);
  switch (merging) {
    case Merging::weighted:
      return {neighbour.token, share, neighbour.cosine / (1.0 + m), 1.0};
    case Merging::pivot:
      return {neighbour.token, (1.0 + m / 2.0) / (1.0 + m), 0.5 / (1.0 + m), 1.0};
    default:
      return {neighbour.token, share, share, 1.0};
  }
}

class Lookm final : public PromptSelection {
 public:
  Lookm(Options options, Rebuild rebuild, Index recent)
      : PromptSelection(std::move(options), rebuild, recent),
        merging_(given().choose<Merging>("merge", {{"no", Merging::none},
                                                   {"mean", Merging::mean},
                                                   {"weighted", Merging::weighted},
                                                   {"pivot", Merging::pivot}})) {}

  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override {
    return {.prompt_rows = PromptRows::all, .keys = merges(), .values = merges()};
  }
  [[nodiscard]] bool merges() const override { return merging_ != Merging::none; }
  [[nodiscard]] std::unique_ptr<PromptScorer> scorer(const SequenceInfo& info,
                                                     const LayerVectors& /*vectors*/) const override {
    return SnapkvScores{.window = info.prompt}.scorer(info);  // sums over all rows, nothing pooled
  }
  [[nodiscard]] bool is_candidate(const SequenceInfo& info, Index token) const override {
    return info.is_visual(token);
  }

  /// max(hh, T') + r with T' text tokens before the last r: all text stays.
  [[nodiscard]] Index kept(const SequenceInfo& info, Index /*layer*/, Index budget) const override {
    const Index old = std::max<Index>(0, info.prompt - window());
    const Index text = std::count(info.image.begin(), info.image.begin() + old, -1);
    return std::min(info.prompt, window() + std::max(budget - window(), text));
  }

  void merge(const LayerVectors& vectors, const LayerCache& cache, Index lane,
             std::span<Evict> evicted) const override {
    if (!merges()) {
      return;
    }
    std::vector<Index> gone;
    std::ranges::transform(evicted, std::back_inserter(gone), &Evict::token);
    std::vector<Index> kept;
    std::ranges::set_difference(eligible(cache, lane, 0, 0), gone, std::back_inserter(kept));
    const std::vector<Neighbour> into = most_similar(vectors.keys[lane], gone, kept);
    std::map<Index, Index> merged;  // how many go into a token
    for (const Neighbour& neighbour : into) {
      ++merged[neighbour.token];
    }
    for (std::size_t i = 0; i < into.size(); ++i) {
      evicted[i].merge = merge_of(merging_, into[i], merged[into[i].token]);
    }
  }

 private:
  Merging merging_;
};

constexpr std::array kOptions = {
    OptionInfo{"budget", "-", "a count of 1 or more, or a share (0.15 or 15%) of the prompt",
               "hh + r: residents, unless there is more text; required, unless it is matched"},
    OptionInfo{"recent", "-", "a count of 1 or more", "r: the last prompt tokens, which stay; required"},
    OptionInfo{"merge", "no", "no, mean, weighted or pivot", "where evicted keys and values go"},
};

std::shared_ptr<const Policy> make(Options options) {
  if (!options.given("recent")) {
    options.fail("recent", "is required; give the number of last prompt tokens that stay");
  }
  const Index recent = options.count("recent", 1);
  return std::make_shared<Lookm>(std::move(options), make, recent);
}

}  // namespace

const PolicyInfo kLookm = {
    "lookm",
    "keeps all text and the picture tokens that are looked at most; may merge the others into them",
    "LOOK-M, arXiv 2406.18139; LLaVA-mix_merge_v1 kv_token_merge",
    "Prefill only: decoding evicts nothing. Text never goes, so a lane may hold more than the budget: "
    "max(budget - recent, old text) + recent. Sums over all prompt rows by query head, then the mean of the "
    "group. An evicted key and value go into those of the kept key of highest cosine in their KV head, of "
    "equal ones the newest: averaged, weighted by the cosine, or halfway first (pivot). Keys merge after "
    "rotary embedding, as in the original. A run that merges is measured by its output errors alone. Needs "
    "all prompt rows; to merge, keys and values.",
    kOptions,
    make};

}  // namespace hae::reference
