#include <algorithm>
#include <array>
#include <numeric>

#include "reference/budgeted_policy.hpp"
#include "reference/policies.hpp"
#include "reference/selection.hpp"
#include "reference/shared_options.hpp"

namespace hae::reference {
namespace {

constexpr std::array kOptions = {
    OptionInfo{"budget", "-", "a count of 1 or more, or a share (0.15 or 15%) of the lane's prompt tokens",
               "residents a lane holds, rounded down to whole blocks; required, unless it is matched"},
    OptionInfo{"block", "32", "a count of 1 or more", "tokens of a block"},
    OptionInfo{"sinks", "32", "a count of 0 or more, in whole blocks",
               "positions 0 .. sinks-1 are never evicted"},
    OptionInfo{"recent", "128", "a count of 1 or more, in whole blocks",
               "the newest blocks, the one that is being filled included, are never evicted"},
    OptionInfo{"pool", "7", "a count of 1 or more", "a token's value is the largest of so many from it on"},
    OptionInfo{"window", "8", "a count of 1 or more", "the last prompt rows that count"},
    OptionInfo{"norm", "sum", "sum or norm_sum", "sum over rows, or that per row since the token came"},
};

struct BlockOptions {
  Index block;
  Index sinks;
  Index recent;
  Index pool;
  Index window;
  bool per_row;
};

constexpr Reduction kSummedHeads = {LaneKind::layer, HeadReduction::sum, Attention::observed};

/// Scores of the tokens of one layer.
///
///   s'[j] = max(s[j] .. s[the pool-1 residents after j]), s the row summed over all heads
///   sum: Σ over rows of s'[j]; norm_sum: that over the number of rows since j came
class PooledScores {
 public:
  PooledScores(const SequenceInfo& info, const BlockOptions& options)
      : options_(options), sums_(at(info.tokens), 0.0), rows_(at(info.tokens), 0) {}

  /// Adds a row over the residents that its query sees, ascending.
  void add(std::span<const double> row, const std::vector<Index>& residents) {
    for (auto token = residents.begin(); token != residents.end(); ++token) {
      const auto end = token + std::min<Index>(options_.pool, residents.end() - token);
      double largest = row[at(*token)];
      for (auto next = token + 1; next != end; ++next) {
        largest = std::max(largest, row[at(*next)]);
      }
      sums_[at(*token)] += largest;
      ++rows_[at(*token)];
    }
  }

  [[nodiscard]] double score(Index token) const {
    // A token that no counted row could see has a sum of 0.
    const Index divisor = options_.per_row ? std::max<Index>(1, rows_[at(token)]) : 1;
    return sums_[at(token)] / static_cast<double>(divisor);
  }

 private:
  BlockOptions options_;
  std::vector<double> sums_;  ///< [T]
  std::vector<Index> rows_;   ///< [T]
};

/// Evicts the lowest blocks between the first and the newest ones until `budget` tokens' worth are left.
Decision evict_blocks(const PooledScores& scores, const LayerCache& cache, Index layer, Index budget,
                      const BlockOptions& options) {
  std::vector<std::vector<Index>> blocks;  // residents of each block that has any, ascending
  for (const Index token : eligible(cache, 0, 0, 0)) {
    if (blocks.empty() || blocks.back().front() / options.block != token / options.block) {
      blocks.emplace_back();
    }
    blocks.back().push_back(token);
  }
  const Index excess = static_cast<Index>(blocks.size()) - budget / options.block;
  Decision decision;
  if (excess <= 0) {
    return decision;
  }
  std::vector<Scored> evictable;  // a block by its place
  const Index newest = static_cast<Index>(blocks.size()) - options.recent / options.block;
  for (Index b = 0; b < newest; ++b) {
    if (blocks[at(b)].front() < options.sinks) {
      continue;
    }
    double score = 0.0;
    for (const Index token : blocks[at(b)]) {
      score += scores.score(token);
    }
    evictable.push_back({score, b});
  }
  for (const Scored& lowest : select_lowest(std::move(evictable), excess)) {
    for (const Index token : blocks[at(lowest.token)]) {
      decision.evict.push_back({layer, 0, token, lowest.score});
    }
  }
  return decision;
}

class BlockDecode final : public LayerDecode {
 public:
  BlockDecode(PooledScores scores, Index budget, const BlockOptions& options)
      : scores_(std::move(scores)), budget_(budget), options_(options) {}

  Decision step(const Rows& row, const LayerCache& cache) override {
    scores_.add(row.values(kSummedHeads, 0, 0), eligible(cache, 0, 0, 0));
    return evict_blocks(scores_, cache, row.layer(), budget_, options_);
  }

 private:
  PooledScores scores_;
  Index budget_;
  BlockOptions options_;
};

class OvBlock final : public BudgetedPolicy {
 public:
  OvBlock(Options options, Rebuild rebuild)
      : BudgetedPolicy(std::move(options), rebuild),
        blocks_{
            given().count("block", 1),  given().count("sinks", 0),
            given().count("recent", 1), given().count("pool", 1),
            given().count("window", 1), given().choose<bool>("norm", {{"sum", false}, {"norm_sum", true}})} {
    for (const std::string_view key : {"sinks", "recent"}) {
      if (given().count(key, 0) % blocks_.block != 0) {
        given().fail(key, "is not in whole blocks of " + std::to_string(blocks_.block) +
                              " tokens; give a multiple, or another block");
      }
    }
  }

  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override {
    return {.newest_prompt_rows = blocks_.window};
  }
  [[nodiscard]] std::unique_ptr<Run> start(const SequenceInfo& info) const override;
  [[nodiscard]] std::optional<Limits> limits_under(const SequenceInfo& /*info*/, Index /*layer*/,
                                                   Index budget) const override {
    const Index tokens = whole_blocks(budget);
    return protects() > tokens ? std::nullopt : std::optional(limits(tokens));
  }
  [[nodiscard]] LaneSizes sizes_under(const Limits& limits, Index residents, Index steps) const override;

  /// The newest block may hold a single token.
  [[nodiscard]] Limits limits(Index budget) const {
    return {.sinks = blocks_.sinks,
            .recent = blocks_.recent - blocks_.block + 1,
            .budget = budget,
            .capacity = budget};
  }

  /// In whole blocks.
  [[nodiscard]] Index fitted(const SequenceInfo& info) const {
    return whole_blocks(budget()->of(info.prompt));
  }
  [[nodiscard]] Index whole_blocks(Index tokens) const { return tokens - tokens % blocks_.block; }
  [[nodiscard]] Index protects() const { return blocks_.sinks + blocks_.recent; }
  [[nodiscard]] const BlockOptions& blocks() const { return blocks_; }

 private:
  BlockOptions blocks_;
};

class BlockRun final : public Run {
 public:
  BlockRun(const OvBlock& policy, const SequenceInfo& info)
      : policy_(policy), info_(info), budget_(policy.fitted(info)) {
    if (policy.protects() > budget_) {
      throw ConfigError("policy '" + policy.spec() + "': sequence '" + info.name +
                        "', layer 0: sinks + recent = " + std::to_string(policy.protects()) +
                        " exceeds the budget of " + std::to_string(budget_) +
                        " tokens in whole blocks; raise the budget or protect fewer");
    }
  }

  void begin_layer(Index /*layer*/, const LayerVectors& /*vectors*/) override {
    scores_.emplace_back(info_, policy_.blocks());
  }

  void observe(const Rows& rows) override {
    for (Index r = 0; r < rows.rows(); ++r) {
      if (rows.query(r) < info_.prompt - policy_.blocks().window) {
        continue;
      }
      std::vector<Index> seen(at(std::max(rows.query(r) + 1, rows.visible(r).back().end)));
      std::iota(seen.begin(), seen.end(), 0);
      scores_.back().add(rows.values(kSummedHeads, 0, r), seen);
    }
  }

  Decision fit(Index layer, const LayerCache& cache) override {
    return evict_blocks(scores_.back(), cache, layer, budget_, policy_.blocks());
  }

  std::unique_ptr<LayerDecode> decode(Index layer) override {
    return std::make_unique<BlockDecode>(std::move(scores_[at(layer)]), budget_, policy_.blocks());
  }

  [[nodiscard]] Limits limits(Index /*layer*/, Index /*lane*/) const override {
    return policy_.limits(budget_);
  }

 private:
  const OvBlock& policy_;
  const SequenceInfo& info_;
  Index budget_;                      ///< in whole blocks
  std::vector<PooledScores> scores_;  ///< [layers begun]
};

std::unique_ptr<Run> OvBlock::start(const SequenceInfo& info) const {
  require_budget();
  return std::make_unique<BlockRun>(*this, info);
}

LaneSizes OvBlock::sizes_under(const Limits& limits, Index residents, Index steps) const {
  // Only the newest block can be short, and it is never evicted: whatever goes is a full block.
  const auto fit = [&](Index held) {
    const Index held_blocks = (held + blocks_.block - 1) / blocks_.block;
    return held - std::max<Index>(0, held_blocks - *limits.budget / blocks_.block) * blocks_.block;
  };
  LaneSizes sizes;
  Index held = fit(residents);
  for (Index step = 0; step < steps; ++step) {
    sizes.total += held + 1;
    sizes.peak = std::max(sizes.peak, held + 1);
    held = fit(held + 1);
  }
  return sizes;
}

std::shared_ptr<const Policy> make(Options options) {
  return std::make_shared<OvBlock>(std::move(options), make);
}

}  // namespace

const PolicyInfo kH2oOvBlock = {
    "h2o/ov-block",
    "H2O over blocks of tokens: evicts the block that was attended to least",
    "H2O, arXiv 2306.14048; the variant of openvino.genai (cache_eviction.cpp)",
    "Online. Heads of a layer are summed, each row is max-pooled forward over the tokens in the cache, the "
    "prompt gives its last `window` rows, and the lowest (score, index) block between the sinks and the "
    "newest blocks goes as a whole: a block's score, which the log shows for each of its tokens, is the sum "
    "of theirs. Blocks are counted, the one being filled too, so a lane holds from budget - block + 1 to "
    "budget tokens. Our reading: pooling runs over residents, not over positions; norm_sum divides by the "
    "counted rows since the token came. Needs the last window prompt rows.",
    kOptions,
    make};

}  // namespace hae::reference
