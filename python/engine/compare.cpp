#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <map>

#include "analysis/interval.hpp"
#include "python/engine/module.hpp"
#include "python/engine/policy_argument.hpp"
#include "python/engine/run.hpp"
#include "python/engine/sequence.hpp"
#include "sim/cli/comparison.hpp"
#include "sim/cli/manifest.hpp"
#include "sim/cli/result_json.hpp"
#include "sim/cli/sha256.hpp"

namespace hae::python {
namespace {

/// Whether the user pressed Ctrl-C. The engine asks often; the interpreter is asked ten times a second.
class Interruption {
 public:
  /// throws  nb::python_error: what the signal's handler raised
  void check() {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < std::chrono::milliseconds(100)) {
      return;
    }
    last_ = now;
    const nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) {
      throw nb::python_error();
    }
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

std::vector<cli::PolicySource> sources_of(const nb::list& policies, bool lock) {
  std::vector<cli::PolicySource> sources;
  for (nb::handle policy : policies) {
    sources.push_back(policy_source_argument(policy, lock));
  }
  if (sources.empty()) {
    throw ConfigError("no policy is given; name at least one, e.g. 'greedy:budget=64'");
  }
  cli::check_distinct(sources);
  return sources;
}

cli::ComparisonOptions options_of(const std::optional<std::string>& match, const std::string& nan,
                                  bool optimal, Index threads, bool lock) {
  const std::map<std::string, MatchTarget> targets = {{"mean", MatchTarget::mean},
                                                      {"peak", MatchTarget::peak}};
  const std::map<std::string, NanRule> rules = {{"error", NanRule::error}, {"lowest", NanRule::lowest}};
  if (match && !targets.contains(*match)) {
    throw ConfigError("match is '" + *match + "'; allowed: mean, peak, None");
  }
  if (!rules.contains(nan)) {
    throw ConfigError("nan is '" + nan + "'; allowed: error, lowest");
  }
  if (threads < 0) {
    throw ConfigError("threads is " + std::to_string(threads) + "; allowed: 0 (one a core) or more");
  }
  cli::ComparisonOptions options;
  if (match) {
    options.match = targets.at(*match);
  }
  options.nan = rules.at(nan);
  options.optimal = optimal;
  options.threads = threads;
  options.lock = lock;
  return options;
}

std::vector<RunHandle> compare_sequences(const std::vector<const SequenceHandle*>& sequences,
                                         const nb::list& policies, const std::optional<std::string>& match,
                                         const std::string& nan, bool optimal, Index threads, bool lock) {
  const std::vector<cli::PolicySource> sources = sources_of(policies, lock);
  const cli::ComparisonOptions options = options_of(match, nan, optimal, threads, lock);
  const bool hashes = std::ranges::any_of(
      sources, [](const cli::PolicySource& source) { return source.log_path().has_value(); });
  std::map<std::string, std::pair<Index, std::string>> files;  // by path: trace index, SHA-256
  std::vector<cli::SequenceSource> chosen;
  std::vector<RunHandle> runs;
  Interruption interruption;
  const nb::gil_scoped_release released;
  for (const SequenceHandle* sequence : sequences) {
    const auto [file, is_new] = files.try_emplace(sequence->path(), static_cast<Index>(files.size()), "");
    if (is_new && hashes && !sequence->path().empty()) {
      file->second.second = cli::sha256_of_file(sequence->path());
    }
    chosen.push_back(
        sequence->source(file->second.first, static_cast<Index>(chosen.size()), file->second.second));
  }
  cli::compare(
      chosen, sources, options, [&](double) { interruption.check(); },
      [&](std::vector<cli::RunRecord> records) {
        for (cli::RunRecord& record : records) {
          runs.push_back({std::move(record)});
        }
      });
  return runs;
}

std::string summary_of(const std::vector<const RunHandle*>& runs) {
  cli::Json json = cli::Json::array();
  std::vector<std::string> groups;
  for (const RunHandle* run : runs) {
    json.push_back(cli::run_json(run->record));
    groups.push_back(run->record.info.group);
  }
  return cli::summary_json(json, groups).dump();
}

std::string manifest_of(const std::vector<std::string>& paths, const nb::list& policies,
                        const std::optional<std::string>& match, const std::string& nan, bool optimal,
                        Index threads, bool lock) {
  cli::ComparisonOptions options = options_of(match, nan, optimal, threads, lock);
  options.traces = paths;
  const std::vector<cli::PolicySource> sources = sources_of(policies, lock);
  for (const cli::PolicySource& source : sources) {
    options.policies.push_back(source.spec());
  }
  const nb::gil_scoped_release released;
  return cli::manifest(options, sources).dump();
}

}  // namespace

void bind_comparison(nb::module_& m) {
  m.def("compare_sequences", &compare_sequences, nb::arg("sequences"), nb::arg("policies"),
        nb::arg("match").none(), nb::arg("nan"), nb::arg("optimal"), nb::arg("threads"), nb::arg("lock"));
  m.def(
      "mean_interval",
      [](const std::vector<double>& observations) -> std::optional<std::pair<double, double>> {
        const std::optional<analysis::Interval> interval = analysis::mean_interval(observations);
        return interval ? std::optional(std::pair(interval->low, interval->high)) : std::nullopt;
      },
      nb::arg("observations"), "Ends of the 95 % t interval of the mean; None for fewer than two.");
  m.def("summary", &summary_of, nb::arg("runs"));
  m.def("manifest", &manifest_of, nb::arg("paths"), nb::arg("policies"), nb::arg("match").none(),
        nb::arg("nan"), nb::arg("optimal"), nb::arg("threads"), nb::arg("lock"));
}

}  // namespace hae::python
