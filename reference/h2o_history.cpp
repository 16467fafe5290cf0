#include <algorithm>
#include <array>

#include "reference/online_policy.hpp"
#include "reference/policies.hpp"

namespace hae::reference {
namespace {

constexpr std::array kOptions = {
    kRequiredBudgetOption,
    kStreamSinksOption,
    kTenRecentOption,
    OptionInfo{"history", "1", "a count of 1 or more",
               "m: the score is the mean of the last m values; 1: of all values"},
    OptionInfo{"indicator", "no", "no or yes", "1 where the attention is at least 1/n, else 0, as the value"},
    kHeadLaneOption,
    kGroupOption,
};

struct HistoryOptions {
  Reduction reduction;
  Index values;  ///< m
  bool indicator;
};

/// The last values of one token.
class History {
 public:
  /// Adds a value and forgets all but the newest `most` ones; 1: forgets nothing.
  void add(double value, Index most) {
    if (most == 1) {
      sum_ += value;
      ++count_;
      return;
    }
    if (static_cast<Index>(last_.size()) == most) {
      last_.erase(last_.begin());
    }
    last_.push_back(value);
    sum_ = 0.0;  // anew, oldest first: a difference of sums would be rounded otherwise
    for (const double kept : last_) {
      sum_ += kept;
    }
    count_ = static_cast<Index>(last_.size());
  }
  [[nodiscard]] double mean() const { return sum_ / static_cast<double>(count_); }

 private:
  std::vector<double> last_;
  double sum_ = 0.0;
  Index count_ = 0;
};

/// prefill  h_j = [(Σ_i A[i, j]) / (P - j)], one value
/// step     h_j gets a[t, j]; score: the mean of its last m values
class HistoryScores final : public OnlineScores {
 public:
  HistoryScores(const SequenceInfo& info, const HistoryOptions& options)
      : options_(options), prompt_(info.prompt), lanes_(at(lane_count(info, options.reduction.lanes))) {
    for (std::vector<History>& lane : lanes_) {
      lane.resize(at(info.tokens));
    }
    sums_.assign(lanes_.size(), std::vector<double>(at(info.prompt), 0.0));
  }

  void prefill(const Rows& rows) override {
    for (Index r = 0; r < rows.rows(); ++r) {
      for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
        const auto row = rows.values(options_.reduction, static_cast<Index>(lane), r);
        const Index keys = std::min(prompt_, static_cast<Index>(row.size()));
        for (Index j = 0; j < keys; ++j) {
          sums_[lane][at(j)] += value(row[at(j)], rows.query(r) + 1);
        }
      }
      if (rows.query(r) == prompt_ - 1) {
        begin_histories();
      }
    }
  }

  void step(const Rows& row, const LayerCache& cache) override {
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
      const auto l = static_cast<Index>(lane);
      const auto values = row.values(options_.reduction, l, 0);
      for (Index j = 0; j < cache.joined(); ++j) {
        if (cache.is_resident(l, j)) {
          lanes_[lane][at(j)].add(value(values[at(j)], cache.residents(l)), options_.values);
        }
      }
    }
  }

  [[nodiscard]] double score(Index lane, Index token) const override {
    return lanes_[at(lane)][at(token)].mean();
  }

 private:
  void begin_histories() {
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
      for (Index j = 0; j < prompt_; ++j) {
        lanes_[lane][at(j)].add(sums_[lane][at(j)] / static_cast<double>(prompt_ - j), options_.values);
      }
    }
    sums_.clear();
  }

  /// tokens  n, those in the cache
  [[nodiscard]] double value(double attention, Index tokens) const {
    if (!options_.indicator) {
      return attention;
    }
    return attention >= 1.0 / static_cast<double>(tokens) ? 1.0 : 0.0;
  }

  HistoryOptions options_;
  Index prompt_;
  std::vector<std::vector<History>> lanes_;  ///< [lanes][T]
  std::vector<std::vector<double>> sums_;    ///< [lanes][P] until the prefill is over
};

std::shared_ptr<const Policy> make(Options options) {
  HistoryOptions history{parse_head_reduction(options), options.count("history", 1),
                         options.choose<bool>("indicator", {{"no", false}, {"yes", true}})};
  OnlinePolicy::Config config;
  config.lanes = history.reduction.lanes;
  config.needs.prompt_rows = PromptRows::all;
  config.sinks = options.count("sinks", 0);
  config.recent = parse_recent(options);
  config.scores = [history](const SequenceInfo& info, Index) {
    return std::make_unique<HistoryScores>(info, history);
  };
  return std::make_shared<OnlinePolicy>(std::move(options), std::move(config), make);
}

}  // namespace

const PolicyInfo kH2oHistory = {
    "h2o/history",
    "H2O by mean attention: over all rows since the token came, or over the last m",
    "H2O, arXiv 2306.14048; the variant of cold-compress (cache.py, KVCacheHeavyHitter)",
    "Online. Scores are exact: a prompt token's history begins with its prefill sum over the rows that saw "
    "it, (sum_i A)/(P - j); each step adds one value, the token's own row included. The original protects by "
    "a score of 1, here protected tokens leave the ranking, and it evicts before a token joins, here after: "
    "a row sees budget + 1 tokens, the newest included in `recent`. With indicator, n is the number of "
    "tokens up to the query in the prefill and in the lane while decoding. Ties go to the older token. Needs "
    "all prompt rows.",
    kOptions,
    make};

}  // namespace hae::reference
