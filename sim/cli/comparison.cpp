#include "sim/cli/comparison.hpp"

#include <algorithm>
#include <charconv>

#include "reference/policies.hpp"
#include "sim/cli/progress.hpp"
#include "traces/trace_file.hpp"

namespace hae::cli {
namespace {

using Policies = std::vector<std::shared_ptr<const Policy>>;

Policies make_policies(const std::vector<std::string>& specs) {
  Policies policies;
  for (const std::string& spec : specs) {
    policies.push_back(reference::make_policy(spec));
    const std::string canonical = policies.back()->spec();
    const auto same = std::ranges::count_if(policies, [&](const auto& p) { return p->spec() == canonical; });
    if (same > 1) {
      throw ConfigError("policy '" + canonical + "' is given twice; give it once");
    }
  }
  return policies;
}

/// Whether a user's word names a sequence of a file: by its name, or where no sequence has that name by its
/// index.
bool selects(const std::string& word, const std::vector<std::string>& names, Index index) {
  if (std::ranges::find(names, word) != names.end()) {
    return names[static_cast<std::size_t>(index)] == word;
  }
  Index number = -1;
  const auto parsed = std::from_chars(word.data(), word.data() + word.size(), number);
  const bool is_number = parsed.ec == std::errc{} && parsed.ptr == word.data() + word.size();
  return is_number && number == index;
}

/// Budgets that follow the first run's: every policy that has one and was given none.
class Matcher {
 public:
  Matcher(const Policies& policies, MatchTarget target) : policies_(policies), target_(target) {}

  /// One more reading of the sequence: the first policy, and the prompt pruning of those that prune.
  [[nodiscard]] Policies matched(Sequence& sequence, const ReplayOptions& options,
                                 const std::string& where) const {
    const SequenceInfo& info = sequence.info();
    Policies probes{policies_.front()};
    for (std::size_t i = 1; i < policies_.size(); ++i) {
      if (policies_[i]->budget_is_open() && policies_[i]->prunes()) {
        probes.push_back(policies_[i]->with_budget(info.tokens));  // evicts nothing but what it prunes
      }
    }
    const std::vector<RunResult> results = replay(sequence, probes, options, where);
    Policies matched{policies_.front()};
    std::size_t probe = 1;
    for (std::size_t i = 1; i < policies_.size(); ++i) {
      if (!policies_[i]->budget_is_open()) {
        matched.push_back(policies_[i]);
        continue;
      }
      const std::vector<Index> after_prune =
          policies_[i]->prunes() ? residents_after_prune(info, results[probe++])
                                 : std::vector<Index>(static_cast<std::size_t>(info.layers), info.prompt);
      matched.push_back(match_budget(info, results.front(), policies_[i], after_prune, target_));
    }
    return matched;
  }

 private:
  const Policies& policies_;
  MatchTarget target_;
};

/// The first run is measured against itself, and `full` has no budget to be unequal to; when it comes first
/// the others are measured against it.
void mark_unequal(std::vector<RunRecord>& records) {
  for (RunRecord& record : records) {
    record.unequal = &record != &records.front() && record.spec != "full" &&
                     unequal_bytes(record.info, records.front().result, record.result);
  }
}

}  // namespace

void compare(const ComparisonOptions& options, const std::function<void(std::vector<RunRecord>)>& take) {
  const Policies policies = make_policies(options.policies);
  std::vector<std::unique_ptr<traces::TraceFile>> files;
  Index all_sequences = 0;
  for (const std::string& path : options.traces) {
    files.push_back(std::make_unique<traces::TraceFile>(path, traces::OpenOptions{.lock = options.lock}));
    all_sequences += files.back()->sequences();
  }
  Progress progress("replaying", static_cast<double>(all_sequences));
  Index sequence_index = 0;
  bool found = false;
  for (const std::unique_ptr<traces::TraceFile>& file : files) {
    for (Index i = 0; i < file->sequences(); ++i, ++sequence_index) {
      if (options.sequence && !selects(*options.sequence, file->sequence_names(), i)) {
        continue;
      }
      found = true;
      const std::unique_ptr<Sequence> sequence = file->open(i);
      ReplayOptions replay_options;
      replay_options.nan = options.nan;
      replay_options.progress = [&](double share) {
        progress.show(static_cast<double>(sequence_index) + share);
      };
      const Policies as_run =
          options.match ? Matcher(policies, *options.match).matched(*sequence, replay_options, file->name())
                        : policies;
      std::vector<RunResult> results = replay(*sequence, as_run, replay_options, file->name());
      std::vector<RunRecord> records;
      for (std::size_t p = 0; p < policies.size(); ++p) {
        records.push_back({sequence_index, i, sequence->info(), policies[p]->spec(), as_run[p]->options(),
                           std::move(results[p]), false});
      }
      mark_unequal(records);
      take(std::move(records));
    }
  }
  if (!found) {
    throw ConfigError("--sequence: no sequence is named '" + options.sequence.value_or("") +
                      "' or has that index; `hae info` lists them");
  }
}

}  // namespace hae::cli
