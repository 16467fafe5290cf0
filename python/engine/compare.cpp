#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>

#include "python/engine/choice.hpp"
#include "python/engine/interruptible.hpp"
#include "python/engine/module.hpp"
#include "python/engine/policy_argument.hpp"
#include "python/engine/run.hpp"
#include "python/engine/sequence.hpp"
#include "sim/cli/comparison.hpp"
#include "sim/cli/manifest.hpp"
#include "sim/cli/result_json.hpp"
#include "sim/cli/sha256.hpp"
#include "sim/cli/statistics.hpp"
#include "sim/cli/trace_files.hpp"

namespace hae::python {
namespace {

std::vector<cli::PolicySource> sources_of(const nb::list& policies) {
  std::vector<cli::PolicySource> sources;
  for (nb::handle policy : policies) {
    sources.push_back(policy_source_argument(policy));
  }
  if (sources.empty()) {
    throw ConfigError("no policy is given; name at least one, e.g. 'greedy:budget=64'");
  }
  cli::check_distinct(sources);
  return sources;
}

cli::ComparisonOptions options_of(const std::optional<std::string>& match, const std::string& nan,
                                  bool optimal, Index threads) {
  const std::map<std::string, MatchTarget> targets = {{"mean", MatchTarget::mean},
                                                      {"peak", MatchTarget::peak}};
  if (match && !targets.contains(*match)) {
    throw ConfigError("match is '" + *match + "'; allowed: mean, peak, None");
  }
  if (threads < 0) {
    throw ConfigError("threads is " + std::to_string(threads) + "; allowed: 0 (one a core) or more");
  }
  cli::ComparisonOptions options;
  if (match) {
    options.match = targets.at(*match);
  }
  options.nan = nan_rule(nan);
  options.optimal = optimal;
  options.threads = threads;
  return options;
}

/// The sequences as a comparison takes them. A stored log is matched to a trace by the file's SHA-256.
std::vector<cli::SequenceSource> chosen(const std::vector<const SequenceHandle*>& sequences, bool hashes) {
  std::map<std::string, std::pair<Index, std::string>> files;  // by path: trace index, SHA-256
  std::vector<cli::SequenceSource> sources;
  for (const SequenceHandle* sequence : sequences) {
    const auto [file, is_new] = files.try_emplace(sequence->path(), static_cast<Index>(files.size()), "");
    auto& [trace_index, sha256] = file->second;
    if (is_new && hashes && !sequence->path().empty()) {
      sha256 = cli::sha256_of_file(sequence->path());
    }
    sources.push_back(sequence->source(trace_index, static_cast<Index>(sources.size()), sha256));
  }
  return sources;
}

std::vector<RunHandle> compare_sequences(const std::vector<const SequenceHandle*>& sequences,
                                         const nb::list& policies, const std::optional<std::string>& match,
                                         const std::string& nan, bool optimal, Index threads) {
  const std::vector<cli::PolicySource> sources = sources_of(policies);
  const cli::ComparisonOptions options = options_of(match, nan, optimal, threads);
  const bool hashes = std::ranges::any_of(
      sources, [](const cli::PolicySource& source) { return source.log_path().has_value(); });
  std::vector<RunHandle> runs;
  interruptible([&](const std::function<void()>& keep_going) {
    cli::compare(
        chosen(sequences, hashes), sources, options, [&](double) { keep_going(); },
        [&](std::vector<cli::RunRecord> records) {
          for (cli::RunRecord& record : records) {
            runs.push_back({std::move(record)});
          }
        });
  });
  return runs;
}

std::string result_of(const std::vector<const RunHandle*>& runs) {
  cli::Json json = cli::Json::array();
  std::vector<std::string> groups;
  for (const RunHandle* run : runs) {
    json.push_back(cli::run_json(run->record));
    groups.push_back(run->record.info.group);
  }
  return cli::result_json(nullptr, json, groups).dump();
}

std::string manifest_of(const std::vector<std::string>& paths, const nb::list& policies,
                        const std::optional<std::string>& match, const std::string& nan, bool optimal) {
  cli::ComparisonOptions options = options_of(match, nan, optimal, 0);
  options.traces = paths;
  const std::vector<cli::PolicySource> sources =
      policies.size() == 0 ? std::vector<cli::PolicySource>{} : sources_of(policies);
  for (const cli::PolicySource& source : sources) {
    options.policies.push_back(source.spec());
  }
  const nb::gil_scoped_release released;
  return cli::manifest(options, sources).dump();
}

std::string statistics_of(const std::vector<const SequenceHandle*>& sequences, double threshold,
                          const std::vector<double>& r, double alpha, const std::string& nan, Index threads) {
  const cli::ComparisonOptions options = options_of(std::nullopt, nan, /*optimal=*/false, threads);
  std::string json;
  interruptible([&](const std::function<void()>& keep_going) {
    json =
        cli::statistics(chosen(sequences, /*hashes=*/false), {.threshold = threshold, .r = r, .alpha = alpha},
                        cli::Json(), options, [&](double) { keep_going(); })
            .dump();
  });
  return json;
}

}  // namespace

void bind_comparison(nb::module_& m) {
  m.def("compare_sequences", &compare_sequences, nb::arg("sequences"), nb::arg("policies"),
        nb::arg("match").none(), nb::arg("nan"), nb::arg("optimal"), nb::arg("threads"),
        "One run a (sequence, policy), in this order.");
  m.def(
      "group_interval",
      [](const std::vector<std::pair<std::string, double>>& observations) {
        return cli::group_interval(observations).dump();
      },
      nb::arg("observations"), "A figure of a summary, as JSON, of (group, value) of each sequence.");
  m.def("statistics", &statistics_of, nb::arg("sequences"), nb::arg("threshold"), nb::arg("r"),
        nb::arg("alpha"), nb::arg("nan"), nb::arg("threads"),
        "A result of hae.stats/1, as JSON, without its manifest.");
  m.def("result", &result_of, nb::arg("runs"), "A result of hae.compare/1, as JSON, without its manifest.");
  m.def("trace_files", &cli::trace_files, nb::arg("paths"),
        "The files that paths of files and folders stand for.");
  m.def("manifest", &manifest_of, nb::arg("paths"), nb::arg("policies"), nb::arg("match").none(),
        nb::arg("nan"), nb::arg("optimal"), "`manifest` of a result, as JSON; its command is the caller's.");
}

}  // namespace hae::python
