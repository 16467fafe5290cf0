#include "sim/cli/comparison.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "analysis/optimal.hpp"
#include "sim/cli/parallel.hpp"
#include "sim/cli/progress.hpp"
#include "sim/cli/sha256.hpp"
#include "traces/trace_file.hpp"

namespace hae::cli {
namespace {

using Policies = std::vector<std::shared_ptr<const Policy>>;

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

/// Makes of policies what drives the engine to what they do: themselves, or what a device did for them.
using Execute = std::function<Policies(const Policies&)>;

/// Policies whose budgets follow the first one's run: every policy that has a budget and was given none.
/// Takes one more reading of the sequence: the first policy, and the prompt pruning of those that prune.
Policies matched(const Policies& policies, MatchTarget target, Sequence& sequence, const Execute& execute,
                 const ReplayOptions& options, const std::string& where) {
  const SequenceInfo& info = sequence.info();
  Policies probes{policies.front()};
  for (std::size_t i = 1; i < policies.size(); ++i) {
    if (policies[i]->budget_is_open() && policies[i]->prunes()) {
      probes.push_back(policies[i]->with_budget(info.tokens));  // evicts nothing but what it prunes
    }
  }
  const std::vector<RunResult> results = replay(sequence, execute(probes), options, where);
  Policies found{policies.front()};
  std::size_t probe = 1;
  for (std::size_t i = 1; i < policies.size(); ++i) {
    if (!policies[i]->budget_is_open()) {
      found.push_back(policies[i]);
      continue;
    }
    const std::vector<Index> after_prune =
        policies[i]->prunes() ? residents_after_prune(info, results[probe++])
                              : std::vector<Index>(static_cast<std::size_t>(info.layers), info.prompt);
    found.push_back(match_budget(info, results.front(), policies[i], after_prune, target));
  }
  return found;
}

/// The first run is measured against itself, and `full` has no budget to be unequal to; when it comes first
/// the others are measured against it.
void mark_unequal(std::vector<RunRecord>& records) {
  for (RunRecord& record : records) {
    record.unequal = &record != &records.front() && record.spec != "full" &&
                     unequal_bytes(record.info, records.front().result, record.result);
  }
}

class Comparison {
 public:
  Comparison(const std::vector<SequenceSource>& sequences, const std::vector<PolicySource>& policies,
             const ComparisonOptions& options, const std::function<void(double)>& progress)
      : sequences_(sequences),
        sources_(policies),
        options_(options),
        progress_(progress),
        parallel_(options.threads) {}

  void run(const std::function<void(std::vector<RunRecord>)>& take) {
    if (options_.backend != kReferenceBackend && !options_.match) {
      run_all_on_device();
    }
    std::vector<std::vector<RunRecord>> records(sequences_.size());
    parallel_.in_order(
        static_cast<Index>(sequences_.size()), [&](Index i) { records[at(i)] = replay_sequence(i); },
        [&](Index i) { take(std::move(records[at(i)])); });
  }

 private:
  /// With budgets that are known, every policy runs over all sequences at once.
  void run_all_on_device() {
    std::vector<std::unique_ptr<Sequence>> opened;
    std::vector<DeviceTask> tasks;
    for (const SequenceSource& source : sequences_) {
      opened.push_back(source.trace->open(source.index_in_trace));
      tasks.push_back(
          {opened.back().get(), source.trace->name(), policies_of(source, opened.back()->info())});
    }
    executed_ = run_on_device(tasks, options_.nan);
  }

  Policies policies_of(const SequenceSource& source, const SequenceInfo& info) const {
    Policies policies;
    for (const PolicySource& policy : sources_) {
      policies.push_back(policy.of(info, source.trace_sha256));
    }
    return policies;
  }

  std::vector<RunRecord> replay_sequence(Index index) {
    const SequenceSource& source = sequences_[at(index)];
    const std::string where = source.trace->name();
    const std::unique_ptr<Sequence> sequence = source.trace->open(source.index_in_trace);
    ReplayOptions replay_options;
    replay_options.nan = options_.nan;
    replay_options.for_each = parallel_.for_each();
    replay_options.progress = progress_.task();
    Policies policies = policies_of(source, sequence->info());
    const Execute execute = [&](const Policies& these) {
      const DeviceTask task{sequence.get(), where, these};
      return options_.backend == kReferenceBackend ? these : run_on_device({&task, 1}, options_.nan).front();
    };
    if (options_.match) {
      policies = matched(policies, *options_.match, *sequence, execute, replay_options, where);
    }
    const Policies executed = executed_.empty() ? execute(policies) : executed_[at(index)];
    std::vector<RunResult> results = replay(*sequence, executed, replay_options, where);
    std::vector<std::optional<double>> optimal(results.size());
    if (options_.optimal) {
      optimal = analysis::optimal_totals(*sequence, results, replay_options, where);
    }
    for (std::size_t p = 0; p < results.size(); ++p) {
      if (options_.optimal && !optimal[p] && sequence->info().steps() > 0 && !results[p].merges) {
        results[p].warnings.push_back(fmt::format(
            "`optimal` was not searched: it would take more than {} MiB", analysis::kMostSearchBytes >> 20));
      }
    }
    const std::vector<std::vector<double>> overlap = kept_overlap(sequence->info(), results);
    std::vector<RunRecord> records;
    for (std::size_t p = 0; p < policies.size(); ++p) {
      records.push_back({source.trace_index, source.sequence_index, source.index_in_trace, sequence->info(),
                         sources_[p].spec(), policies[p]->options(), options_.backend, std::move(results[p]),
                         optimal[p], false, overlap[p]});
    }
    mark_unequal(records);
    return records;
  }

  const std::vector<SequenceSource>& sequences_;
  const std::vector<PolicySource>& sources_;
  const ComparisonOptions& options_;
  ProgressSum progress_;
  Parallel parallel_;
  std::vector<Policies> executed_;  ///< [sequences], where a device ran all of them beforehand
};

}  // namespace

std::vector<std::string> input_files(const ComparisonOptions& options,
                                     const std::vector<PolicySource>& policies) {
  std::vector<std::string> files = options.traces;
  for (const PolicySource& policy : policies) {
    if (policy.log_path()) {
      files.push_back(*policy.log_path());
    }
  }
  return files;
}

std::vector<SequenceSource> choose_sequences(const ComparisonOptions& options,
                                             const std::vector<PolicySource>& policies) {
  const bool hashes =
      std::ranges::any_of(policies, [](const PolicySource& source) { return source.log_path().has_value(); });
  std::vector<SequenceSource> chosen;
  Index sequence_index = 0;
  for (std::size_t trace = 0; trace < options.traces.size(); ++trace) {
    const std::string& path = options.traces[trace];
    const auto file = std::make_shared<traces::TraceFile>(path, traces::OpenOptions{.lock = options.lock});
    const std::string hash = hashes ? sha256_of_file(path) : "";
    for (Index i = 0; i < file->sequences(); ++i, ++sequence_index) {
      if (!options.sequence || selects(*options.sequence, file->sequence_names(), i)) {
        chosen.push_back({file, static_cast<Index>(trace), i, sequence_index, hash});
      }
    }
  }
  if (chosen.empty()) {
    throw ConfigError("--sequence: no sequence is named '" + options.sequence.value_or("") +
                      "' or has that index; `hae info` lists them");
  }
  return chosen;
}

void compare(const std::vector<SequenceSource>& sequences, const std::vector<PolicySource>& policies,
             const ComparisonOptions& options, const std::function<void(double)>& progress,
             const std::function<void(std::vector<RunRecord>)>& take) {
  Comparison(sequences, policies, options, progress).run(take);
}

void compare(const ComparisonOptions& options, const std::vector<PolicySource>& policies,
             const std::function<void(std::vector<RunRecord>)>& take) {
  const std::vector<SequenceSource> sequences = choose_sequences(options, policies);
  Progress progress("replaying", static_cast<double>(sequences.size()));
  compare(
      sequences, policies, options, [&](double done) { progress.show(done); }, take);
}

}  // namespace hae::cli
