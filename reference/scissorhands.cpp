#include <array>

#include "reference/draws.hpp"
#include "reference/online_policy.hpp"
#include "reference/policies.hpp"
#include "reference/random.hpp"
#include "sim/row_kernels.hpp"

namespace hae::reference {
namespace {

constexpr std::array kOptions = {
    kRequiredBudgetOption,
    kStreamSinksOption,
    kTenRecentOption,
    OptionInfo{"window", "8", "a count of 1 or more", "the last prompt rows that count"},
    OptionInfo{"decay", "0.9", "a number from 0 to 1", "lambda: what a forward leaves of the importance"},
    OptionInfo{"select", "top", "top or sample",
               "keep the most important tokens, or draw with probability softmax(importance/T)"},
    OptionInfo{"temperature", "1", "a number above 0", "sample: T"},
    kSeedOption,
    kHeadLaneOption,
    kGroupOption,
};

/// How the tokens that stay are drawn.
struct Sampling {
  double temperature;
  std::uint64_t seed;
};

struct ImportanceOptions {
  Reduction reduction;
  Index window;
  double decay;
  std::optional<Sampling> sampling;
};

/// I_j <- λ I_j + Σ over the rows of a forward of A[i, j]: of the prefill the last `window` ones, of a step
/// its own.
class Importance final : public OnlineScores {
 public:
  Importance(const SequenceInfo& info, Index layer, const ImportanceOptions& options)
      : options_(options),
        layer_(layer),
        window_begin_(info.prompt - options.window),
        importance_(at(lane_count(info, options.reduction.lanes)),
                    std::vector<double>(at(kernels::padded(info.tokens)), 0.0)) {}

  void prefill(const Rows& rows) override {
    for (Index r = 0; r < rows.rows(); ++r) {
      if (rows.query(r) >= window_begin_) {
        add(rows, r);
      }
    }
  }

  void step(const Rows& row, const LayerCache& /*cache*/) override {
    for (std::vector<double>& lane : importance_) {
      for (double& importance : lane) {
        importance *= options_.decay;
      }
    }
    add(row, 0);
  }

  [[nodiscard]] double score(Index lane, Index token) const override {
    const double importance = importance_[at(lane)][at(token)];
    if (!options_.sampling) {
      return importance;
    }
    const auto& [temperature, seed] = *options_.sampling;
    return importance / temperature + gumbel(random_priority(seed, layer_, lane, token));
  }

 private:
  void add(const Rows& rows, Index row) {
    for (std::size_t lane = 0; lane < importance_.size(); ++lane) {
      const auto values = rows.values(options_.reduction, static_cast<Index>(lane), row);
      kernels::add(values.data(), importance_[lane].data(), static_cast<Index>(values.size()));
    }
  }

  ImportanceOptions options_;
  Index layer_;
  Index window_begin_;
  std::vector<std::vector<double>> importance_;  ///< [lanes][padded T]
};

std::optional<Sampling> parse_sampling(Options& options) {
  if (!options.choose<bool>("select", {{"top", false}, {"sample", true}})) {
    options.exclude({"temperature", "seed"}, "select=top");
    return std::nullopt;
  }
  const Sampling sampling{options.threshold("temperature"), options.seed("seed")};
  if (sampling.temperature == 0.0) {
    options.fail("temperature");
  }
  return sampling;
}

std::shared_ptr<const Policy> make(Options options) {
  const ImportanceOptions importance{parse_head_reduction(options), options.count("window", 1),
                                     options.threshold("decay"), parse_sampling(options)};
  if (importance.decay > 1.0) {
    options.fail("decay");
  }
  OnlinePolicy::Config config;
  config.lanes = importance.reduction.lanes;
  config.needs.newest_prompt_rows = importance.window;
  config.sinks = options.count("sinks", 0);
  config.recent = parse_recent(options);
  config.scores = [importance](const SequenceInfo& info, Index layer) {
    return std::make_unique<Importance>(info, layer, importance);
  };
  return std::make_shared<OnlinePolicy>(std::move(options), std::move(config), make);
}

}  // namespace

const PolicyInfo kScissorhands = {
    "scissorhands",
    "evicts by attention of recent forwards, which fades",
    "Scissorhands, arXiv 2305.17118; the form of KVCache-Factory (scissorhands.py)",
    "Online. Importance, protection and selection are as stated there; when it runs is our reading: once "
    "after the prefill with its last window rows, then after every step with the step's row. The defaults of "
    "window and decay are ours. select=sample draws without replacement, one fixed draw a (seed, layer, "
    "lane, token); report several seeds. The official code has no budget and lets keys come back: a mask, "
    "not an eviction, so it is not here. Ties go to the older token. Needs the last window prompt rows.",
    kOptions,
    make};

}  // namespace hae::reference
