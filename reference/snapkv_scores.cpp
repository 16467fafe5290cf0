#include "reference/snapkv_scores.hpp"

#include <algorithm>

#include "sim/row_kernels.hpp"

namespace hae::reference {
namespace {

class Scorer final : public PromptScorer {
 public:
  Scorer(const SnapkvScores& rule, const SequenceInfo& info)
      : rule_(rule), info_(info), sums_(info, rule.window) {}

  void observe(const Rows& rows) override { sums_.observe(rows); }

  [[nodiscard]] TokenScores scores() const override {
    TokenScores scores = sums_.sums();
    if (rule_.is_mean) {
      for (std::vector<double>& row : scores) {
        kernels::divide(row.data(), static_cast<double>(rule_.window), std::ssize(row));
      }
    }
    const Index candidates = std::max<Index>(0, info_.prompt - rule_.window);
    if (rule_.pools_groups) {
      scores = reduce_groups(scores, info_, rule_.group);
    }
    pool_neighbours(scores, candidates, rule_.kernel, rule_.pool);
    return rule_.pools_groups ? scores : reduce_groups(scores, info_, rule_.group);
  }

 private:
  SnapkvScores rule_;
  const SequenceInfo& info_;
  HeadSums sums_;
};

}  // namespace

std::unique_ptr<PromptScorer> SnapkvScores::scorer(const SequenceInfo& info) const {
  return std::make_unique<Scorer>(*this, info);
}

SnapkvScores parse_snapkv_scores(const Options& options) {
  SnapkvScores rule;
  rule.window = options.count("window", 1);
  rule.kernel = options.count("kernel", 1);
  if (rule.kernel % 2 == 0) {
    options.fail("kernel");
  }
  rule.pool = options.choose<Pool>("pool", {{"mean", Pool::mean}, {"max", Pool::max}});
  rule.group = parse_group(options);
  return rule;
}

}  // namespace hae::reference
