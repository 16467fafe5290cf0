#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>

#include "sim/cli/command.hpp"
#include "sim/cli/json_input.hpp"
#include "sim/cli/manifest.hpp"
#include "sim/cli/replay_options.hpp"
#include "sim/cli/result_folder.hpp"
#include "sim/cli/sha256.hpp"

namespace hae::cli {
namespace {

namespace fs = std::filesystem;

struct Arguments {
  std::string result;
  std::vector<std::string> traces;
  Index threads = 0;
  bool no_lock = false;
};

/// A stored result: figures, logs, or both.
struct Stored {
  std::string name;
  Json manifest;
  Json summary;                         ///< null where only logs were stored
  Json overlap;                         ///< null where only logs were stored
  Json runs;                            ///< null where only logs were stored
  std::vector<traces::StoredRun> logs;  ///< empty where only figures were stored
};

bool is_hdf5(const fs::path& path) {
  std::array<char, 8> head{};
  std::ifstream(path, std::ios::binary).read(head.data(), head.size());
  return std::string_view(head.data(), head.size()) == std::string_view("\x89HDF\r\n\x1a\n", 8);
}

void read_logs(const fs::path& path, bool lock, Stored& stored) {
  traces::StoredRuns runs = traces::read_runs(path, lock);
  stored.logs = std::move(runs.runs);
  stored.manifest = parse_json(runs.manifest, path.string() + ":/manifest");
}

void read_figures(const fs::path& path, Stored& stored) {
  Json result = read_result(path);
  stored.manifest = std::move(result["manifest"]);
  stored.runs = std::move(result["runs"]);
  stored.summary = std::move(result["summary"]);
  stored.overlap = std::move(result["overlap"]);
}

/// Both files of a folder say what the logs are; that they agree shows that they belong together.
void check_pair(const Stored& stored) {
  bool agree = stored.runs.size() == stored.logs.size();
  for (std::size_t i = 0; agree && i < stored.logs.size(); ++i) {
    agree = stored.runs[i].value("log_sha256", Json()) == sha256(to_json_lines(stored.logs[i].log));
  }
  if (!agree) {
    throw TraceError(fmt::format("{}: {} and {} are of different runs; compare again with --out", stored.name,
                                 kResultName, kRunsName));
  }
}

Stored read_stored(const fs::path& path, bool lock) {
  Stored stored;
  stored.name = path.string();
  if (fs::is_directory(path)) {
    read_logs(path / kRunsName, lock, stored);
    read_figures(path / kResultName, stored);
    check_pair(stored);
  } else if (is_hdf5(path)) {
    read_logs(path, lock, stored);
  } else {
    read_figures(path, stored);
  }
  return stored;
}

void expect_unchanged(const std::string& path, const std::string& sha256, const Stored& stored,
                      const char* remedy) {
  if (!fs::exists(path)) {
    throw TraceError(fmt::format("{}: is not there, and {} was made from it; {}", path, stored.name, remedy));
  }
  const std::string now = sha256_of_file(path);
  if (now != sha256) {
    throw TraceError(fmt::format("{}: has changed: its SHA-256 is {}, {} was made from {}; {}", path, now,
                                 stored.name, sha256, remedy));
  }
}

/// Where each trace of the manifest is now: one of `given`, known by its bytes, or the place it was at.
std::vector<std::string> find_traces(const Stored& stored, const std::vector<std::string>& given) {
  const std::vector<traces::StoredTrace> traces = stored_traces(stored.manifest);
  std::map<std::string, std::string> by_hash;
  for (const std::string& path : given) {
    const std::string hash = sha256_of_file(path);
    if (std::ranges::find(traces, hash, &traces::StoredTrace::sha256) == traces.end()) {
      throw ConfigError(fmt::format(
          "--trace {}: {} was made from no such bytes (SHA-256 {}); name the trace it was made from", path,
          stored.name, hash));
    }
    by_hash[hash] = path;
  }
  std::vector<std::string> found;
  for (const traces::StoredTrace& trace : traces) {
    if (const auto match = by_hash.find(trace.sha256); match != by_hash.end()) {
      found.push_back(match->second);
    } else {
      expect_unchanged(trace.path, trace.sha256, stored, "name the right file with --trace");
      found.push_back(trace.path);
    }
  }
  return found;
}

/// A member that should be text.
std::string text_of(const Json& object, const char* key, const char* otherwise) {
  const Json value = object.is_object() ? object.value(key, Json()) : Json();
  return value.is_string() ? value.get<std::string>() : otherwise;
}

void expect_same_logs(const Stored& stored) {
  for (const Json& log : stored.manifest.value("logs", Json::array())) {
    expect_unchanged(text_of(log, "path", ""), text_of(log, "sha256", ""), stored,
                     "put the run file it was made from there again");
  }
}

/// Figures that need libm or have many optima may differ in their last digits between platforms.
bool is_promised(const std::string& key) {
  constexpr std::array kFree = {"kl",     "decode.kl.mean", "optimal", "optimal_mean",
                                "regret", "interval95",     "warnings"};
  return std::ranges::find(kFree, key) == kFree.end();
}

/// The first promised figure that differs, as `path was this, is that`; empty if none does.
std::string first_difference(const Json& stored, const Json& now, const std::string& path = "") {
  if (!stored.is_object() || !now.is_object()) {
    return stored == now ? "" : fmt::format("{} was {}, is {}", path, stored.dump(), now.dump());
  }
  std::set<std::string> keys;
  for (const Json* side : {&stored, &now}) {
    for (const auto& [key, value] : side->items()) {
      keys.insert(key);
    }
  }
  for (const std::string& key : keys) {
    if (!is_promised(key)) {
      continue;
    }
    const std::string inner = path + (path.empty() ? "" : ".") + key;
    if (!stored.contains(key) || !now.contains(key)) {
      return inner + (now.contains(key) ? " was not stored" : " was stored, and is unknown");
    }
    if (const std::string found = first_difference(stored[key], now[key], inner); !found.empty()) {
      return found;
    }
  }
  return "";
}

/// The first lines in which two logs differ.
std::string log_difference(const EvictionLog& stored, const EvictionLog& now) {
  const auto line = [](const EvictionLog& log, std::size_t i) {
    if (i >= log.entries.size()) {
      return std::string("nothing");
    }
    std::string text = to_json_lines({{log.entries[i]}, {}});
    text.pop_back();
    return text;
  };
  std::size_t i = 0;
  while (i < stored.entries.size() && i < now.entries.size() && stored.entries[i] == now.entries[i]) {
    ++i;
  }
  if (i == stored.entries.size() && i == now.entries.size()) {
    return "the tokens pending at the end differ";
  }
  return fmt::format("eviction {} was {}, is {}", i, line(stored, i), line(now, i));
}

/// Compares each run as it comes; throws at the first that differs.
class Verdict {
 public:
  explicit Verdict(const Stored& stored) : stored_(stored) {}

  void take(const RunRecord& record) {
    const std::string where = fmt::format("sequence '{}', policy {}", record.info.name, record.spec);
    if (next_ >= runs()) {
      throw AnswerIsNo(fmt::format("{}: differs: {} was not run then", stored_.name, where));
    }
    if (!stored_.logs.empty()) {
      const traces::StoredRun& then = stored_.logs[next_];
      expect_same_run(where, record, then);
      if (!(then.log == record.result.log)) {
        throw AnswerIsNo(fmt::format("{}: differs: {}: {}", stored_.name, where,
                                     log_difference(then.log, record.result.log)));
      }
    }
    if (!stored_.runs.is_null()) {
      runs_.push_back(parse_json(json_text(run_json(record)), where));  // as a file holds it
      groups_.push_back(record.info.group);
      compare_figures(where);
    }
    ++next_;
  }

  /// Says so when everything was the same.
  void conclude() const {
    if (next_ != runs()) {
      throw AnswerIsNo(fmt::format("{}: differs: {} runs then, {} now", stored_.name, runs(), next_));
    }
    compare_summary();
    fmt::print("{}: identical: {} {}{} (made by hae {}, {}; repeated by {})\n", stored_.name, runs(),
               runs() == 1 ? "log" : "logs", stored_.runs.is_null() ? "" : " and their figures",
               text_of(stored_.manifest, "version", "?"), text_of(stored_.manifest, "compiler", "?"),
               version_text());
  }

 private:
  [[nodiscard]] std::size_t runs() const {
    return stored_.logs.empty() ? stored_.runs.size() : stored_.logs.size();
  }

  void expect_same_run(const std::string& where, const RunRecord& record,
                       const traces::StoredRun& then) const {
    traces::RunIdentity identity = identity_of(record);
    identity.trace = then.identity.trace;  // into the traces of its own file
    if (!(then.identity == identity) || then.lanes != record.result.lanes) {
      throw AnswerIsNo(fmt::format(
          "{}: differs: sequence '{}', policy {} with other options, lanes or place was run then, {} now",
          stored_.name, then.identity.sequence, then.identity.policy, where));
    }
  }

  void compare_figures(const std::string& where) const {
    const Json& then = stored_.runs[next_];
    const Json& now = runs_.back();
    if (then.value("log_sha256", Json()) != now["log_sha256"] && stored_.logs.empty()) {
      throw AnswerIsNo(
          fmt::format("{}: differs: {}: another log (it is not stored: compare with --out keeps logs)",
                      stored_.name, where));
    }
    if (const std::string difference = first_difference(then, now); !difference.empty()) {
      throw AnswerIsNo(fmt::format("{}: differs: {}: {}", stored_.name, where, difference));
    }
  }

  void compare_summary() const {
    if (stored_.summary.is_null()) {
      return;
    }
    const Json result = parse_json(json_text(result_json(stored_.manifest, runs_, groups_)), "result");
    const Json& now = result["summary"];
    for (std::size_t i = 0; i < std::max(now.size(), stored_.summary.size()); ++i) {
      const std::string difference = i < std::min(now.size(), stored_.summary.size())
                                         ? first_difference(stored_.summary[i], now[i])
                                         : "another number of policies";
      if (!difference.empty()) {
        throw AnswerIsNo(fmt::format("{}: differs: summary[{}]: {}", stored_.name, i, difference));
      }
    }
    if (const std::string difference = first_difference(stored_.overlap, result["overlap"], "overlap");
        !difference.empty()) {
      throw AnswerIsNo(fmt::format("{}: differs: {}", stored_.name, difference));
    }
  }

  const Stored& stored_;
  std::size_t next_ = 0;
  Json runs_ = Json::array();  ///< so far, where figures were stored
  std::vector<std::string> groups_;
};

void run(const Arguments& arguments) {
  const Stored stored = read_stored(arguments.result, !arguments.no_lock);
  ComparisonOptions options = options_of(stored.manifest, stored.name);
  check_backend(options.backend);
  options.traces = find_traces(stored, arguments.traces);
  expect_same_logs(stored);
  options.optimal = false;  // Its evictions are not defined uniquely, so it is not compared.
  options.threads = arguments.threads;
  options.lock = !arguments.no_lock;
  Verdict verdict(stored);
  compare(options, policy_sources(options.policies, options.lock),
          [&](const std::vector<RunRecord>& records) {
            for (const RunRecord& record : records) {
              verdict.take(record);
            }
          });
  verdict.conclude();
}

}  // namespace

void add_rerun(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand("rerun", "Repeat a stored result and say whether it is identical");
  command
      ->add_option("result", arguments->result,
                   "A folder of compare --out, a file of compare --json, or a file of replay --out")
      ->required()
      ->type_name("RESULT");
  command
      ->add_option("--trace", arguments->traces,
                   "Where a trace is now, if not where it was: known by its SHA-256")
      ->type_name("TRACE");
  add_machine_options(*command, arguments->threads, arguments->no_lock);
  command->footer("Example:\n  hae rerun results/ --trace traces/data/boards-test.h5");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace hae::cli
