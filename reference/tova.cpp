#include <algorithm>
#include <array>

#include "reference/online_policy.hpp"
#include "reference/policies.hpp"

namespace hae::reference {
namespace {

constexpr std::array kOptions = {kRequiredBudgetOption};

/// s_j = (1/H) Σ_h A[h, last, j]                          TOVA, arXiv 2401.06104
class LastRow final : public OnlineScores {
 public:
  explicit LastRow(const SequenceInfo& info) : last_prompt_row_(info.prompt - 1) {}

  void prefill(const Rows& rows) override {
    for (Index r = 0; r < rows.rows(); ++r) {
      if (rows.query(r) == last_prompt_row_) {
        take(rows, r);
      }
    }
  }
  void step(const Rows& row, const LayerCache& /*cache*/) override { take(row, 0); }
  [[nodiscard]] double score(Index /*lane*/, Index token) const override { return scores_[at(token)]; }

 private:
  void take(const Rows& rows, Index row) {
    const std::span<const double> values = rows.values({}, 0, row);
    scores_.assign(values.begin(), values.end());
  }

  Index last_prompt_row_;
  std::vector<double> scores_;  ///< by position
};

std::shared_ptr<const Policy> make(Options options) {
  OnlinePolicy::Config config;
  config.needs.newest_prompt_rows = 1;
  config.recent = [](Index) { return Index{0}; };
  config.scores = [](const SequenceInfo& info, Index) { return std::make_unique<LastRow>(info); };
  return std::make_shared<OnlinePolicy>(std::move(options), std::move(config), make);
}

}  // namespace

const PolicyInfo kTova = {"tova",
                          "keeps the tokens that the newest row attends to most",
                          "TOVA, arXiv 2401.06104; the official src/tova_cache.py",
                          "Online. Exact: after each forward the tokens of largest mean attention over all "
                          "heads in the newest row stay, the same ones in every head; no token is protected, "
                          "so the newest may go. Ties go to the older token. kvpress's variant, which prunes "
                          "once and forces the newest token to stay, is not here. Needs the last prompt row.",
                          kOptions,
                          make};

}  // namespace hae::reference
