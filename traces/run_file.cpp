#include "traces/run_file.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <optional>

#include "traces/hdf5_output.hpp"
#include "traces/layout.hpp"
#include "traces/message.hpp"

namespace hae::traces {
namespace {

using hdf5::Axis;
using hdf5::Content;
using hdf5::Dataset;
using hdf5::Group;
using hdf5::Guard;
using hdf5::Handle;
using hdf5::OutputFile;
using hdf5::write_attribute;

constexpr Index kRunVersion = 2;

/// How a column says "none": no step, layer or token is negative.
constexpr Index kNone = -1;

const char* name_of(LaneKind lanes) {
  return lanes == LaneKind::layer ? "layer" : "kv_head";
}

// ---- writing

template <typename Entries, typename Field>
void write_column(const OutputFile& file, hid_t group, const char* name, const Entries& entries,
                  Field field) {
  std::vector<Index> column;
  column.reserve(entries.size());
  for (const auto& entry : entries) {
    column.push_back(field(entry));
  }
  file.write_integers(group, name, column);
}

/// What a merge needs besides its target; absent when nothing was merged.
constexpr std::array kMergeColumns = {std::pair{"kept_weight", &Merge::kept_weight},
                                      std::pair{"weight", &Merge::weight}, std::pair{"size", &Merge::size}};

void write_merges(const OutputFile& file, hid_t log, const std::vector<LogEntry>& entries) {
  if (std::ranges::none_of(entries, [](const LogEntry& entry) { return entry.merge.has_value(); })) {
    return;
  }
  for (const auto& [name, field] : kMergeColumns) {
    std::vector<double> column;
    for (const LogEntry& entry : entries) {
      column.push_back(entry.merge ? (*entry.merge).*field : 0.0);
    }
    file.write_reals(log, name, column);
  }
}

void write_log(const OutputFile& file, hid_t run, const std::vector<LogEntry>& entries) {
  const Handle group = file.create_group(run, "log");
  const auto write = [&](const char* name, auto field) {
    write_column(file, group.get(), name, entries, field);
  };
  write("step", [](const LogEntry& entry) { return entry.step; });
  write("layer", [](const LogEntry& entry) { return entry.layer; });
  write("lane", [](const LogEntry& entry) { return entry.lane; });
  write("token", [](const LogEntry& entry) { return entry.token; });
  write("within", [](const LogEntry& entry) { return Index{entry.within}; });
  write("has_score", [](const LogEntry& entry) { return Index{entry.score.has_value()}; });
  write("pending_since", [](const LogEntry& entry) { return entry.pending_since.value_or(kNone); });
  write("into", [](const LogEntry& entry) { return entry.merge ? entry.merge->into : kNone; });
  write_merges(file, group.get(), entries);
  std::vector<double> scores;
  for (const LogEntry& entry : entries) {
    scores.push_back(entry.score.value_or(0));
  }
  file.write_reals(group.get(), "score", scores);
}

void write_pending(const OutputFile& file, hid_t run, const std::vector<PendingEntry>& entries) {
  const Handle group = file.create_group(run, "pending");
  const auto write = [&](const char* name, auto field) {
    write_column(file, group.get(), name, entries, field);
  };
  write("layer", [](const PendingEntry& entry) { return entry.layer; });
  write("lane", [](const PendingEntry& entry) { return entry.lane; });
  write("token", [](const PendingEntry& entry) { return entry.token; });
  write("since", [](const PendingEntry& entry) { return entry.since; });
}

/// `metric` over [layers, query_heads, rows]; NaN where a row is not in the metric's population.
void write_series(const OutputFile& file, hid_t run, const char* name, const Series& series) {
  if (series.rows == 0) {
    return;
  }
  const Handle group = file.create_group(run, name);
  const std::array<hsize_t, 3> shape{static_cast<hsize_t>(series.layers),
                                     static_cast<hsize_t>(series.query_heads),
                                     static_cast<hsize_t>(series.rows)};
  for (const Metric metric : kMetrics) {
    file.write_reals(group.get(), hae::name(metric), series.all(metric), shape);
  }
}

void write_measurements(const OutputFile& file, hid_t run, const RunResult& result) {
  write_series(file, run, "decode", result.decode);
  write_series(file, run, "prefill", result.prefill);
  if (result.decode.rows == 0) {
    return;
  }
  const auto layers = static_cast<hsize_t>(result.decode.layers);
  const auto steps = static_cast<hsize_t>(result.decode.rows);
  const hsize_t lanes = result.attention_tokens.size() / (layers * steps);
  file.write_integers(run, "attention_tokens", result.attention_tokens, std::array{layers, lanes, steps});
  file.write_reals(run, "top_now", result.top_now,
                   std::array{layers, static_cast<hsize_t>(result.decode.query_heads), steps});
}

void write_run(const OutputFile& file, hid_t runs, Index index, const RunIdentity& identity,
               const RunResult& result) {
  const Handle group = file.create_group(runs, six_digits(index));
  write_attribute(group.get(), "trace", identity.trace);
  write_attribute(group.get(), "sequence_index", identity.sequence_index);
  write_attribute(group.get(), "sequence", identity.sequence);
  write_attribute(group.get(), "policy", identity.policy);
  write_attribute(group.get(), "lanes", std::string(name_of(result.lanes)));
  std::vector<std::string> keys;
  std::vector<std::string> values;
  for (const auto& [key, value] : identity.options) {
    keys.push_back(key);
    values.push_back(value);
  }
  file.write_strings(group.get(), "option_key", keys);
  file.write_strings(group.get(), "option_value", values);
  write_log(file, group.get(), result.log.entries);
  write_pending(file, group.get(), result.log.pending);
  write_measurements(file, group.get(), result);
}

void write_traces(const OutputFile& file, const std::vector<StoredTrace>& traces) {
  std::vector<std::string> paths;
  std::vector<std::string> hashes;
  for (const StoredTrace& trace : traces) {
    paths.push_back(trace.path);
    hashes.push_back(trace.sha256);
  }
  file.write_strings(file.root().get(), "trace_path", paths);
  file.write_strings(file.root().get(), "trace_sha256", hashes);
}

// ---- reading

/// The columns of one table, all of one length.
class Table {
 public:
  explicit Table(Group group) : group_(std::move(group)) {
    // The first column says how long the others must be.
    const Dataset layer = group_.dataset("layer", Content::integers);
    layer.expect_shape(std::array<Axis, 1>{{{"entries", std::nullopt}}});
    rows_ = layer.shape()[0];
  }

  [[nodiscard]] std::size_t rows() const { return static_cast<std::size_t>(rows_); }
  [[nodiscard]] const std::string& where() const { return group_.where(); }

  [[nodiscard]] std::vector<Index> integers(const char* name, Index least, Index most = INT64_MAX) const {
    const Dataset dataset = column(name, Content::integers);
    std::vector<Index> values = dataset.read_integers();
    for (std::size_t row = 0; row < values.size(); ++row) {
      if (values[row] < least || values[row] > most) {
        refuse(dataset.where(), "[", row, "]: found ", values[row], ", expected at least ", least,
               most < INT64_MAX ? message(" and at most ", most) : "", "; write the run again");
      }
    }
    return values;
  }

  [[nodiscard]] std::vector<double> reals(const char* name) const {
    return column(name, Content::reals).read_reals();
  }

 private:
  [[nodiscard]] Dataset column(const char* name, Content content) const {
    Dataset dataset = group_.dataset(name, content);
    dataset.expect_shape(std::array<Axis, 1>{{{"entries", rows_}}});
    return dataset;
  }

  Group group_;
  Index rows_ = 0;
};

std::optional<Index> unless_none(Index value) {
  return value == kNone ? std::nullopt : std::optional(value);
}

void read_merges(const Table& table, std::vector<LogEntry>& entries) {
  if (std::ranges::none_of(entries, [](const LogEntry& entry) { return entry.merge.has_value(); })) {
    return;
  }
  for (const auto& [name, field] : kMergeColumns) {
    const std::vector<double> column = table.reals(name);
    for (std::size_t row = 0; row < entries.size(); ++row) {
      if (entries[row].merge) {
        (*entries[row].merge).*field = column[row];
      }
    }
  }
}

std::vector<LogEntry> read_log(const Table& table) {
  const std::vector<Index> step = table.integers("step", 0);
  const std::vector<Index> layer = table.integers("layer", 0);
  const std::vector<Index> lane = table.integers("lane", kLayerLane);
  const std::vector<Index> token = table.integers("token", 0);
  const std::vector<Index> within = table.integers("within", 0, 1);
  const std::vector<Index> has_score = table.integers("has_score", 0, 1);
  const std::vector<Index> pending_since = table.integers("pending_since", kNone);
  const std::vector<Index> into = table.integers("into", kNone);
  const std::vector<double> score = table.reals("score");
  std::vector<LogEntry> entries(table.rows());
  for (std::size_t row = 0; row < entries.size(); ++row) {
    entries[row].step = step[row];
    entries[row].layer = layer[row];
    entries[row].lane = lane[row];
    entries[row].token = token[row];
    entries[row].within = within[row] == 1;
    entries[row].score = has_score[row] == 1 ? std::optional(score[row]) : std::nullopt;
    if (entries[row].score && !std::isfinite(*entries[row].score)) {
      refuse(table.where(), "/score[", row, "]: found ", score[row],
             ", expected a finite number; write the run again");
    }
    entries[row].pending_since = unless_none(pending_since[row]);
    if (into[row] != kNone) {
      entries[row].merge = Merge{into[row]};
    }
  }
  read_merges(table, entries);
  return entries;
}

std::vector<PendingEntry> read_pending(const Table& table) {
  const std::vector<Index> layer = table.integers("layer", 0);
  const std::vector<Index> lane = table.integers("lane", kLayerLane);
  const std::vector<Index> token = table.integers("token", 0);
  const std::vector<Index> since = table.integers("since", 0);
  std::vector<PendingEntry> entries;
  for (std::size_t row = 0; row < table.rows(); ++row) {
    entries.push_back({layer[row], lane[row], token[row], since[row]});
  }
  return entries;
}

/// Two lists of strings of one length.
std::vector<std::pair<std::string, std::string>> read_pairs(const Group& group, const char* first,
                                                            const char* second) {
  const Dataset keys = group.dataset(first, Content::strings);
  keys.expect_shape(std::array<Axis, 1>{{{"entries", std::nullopt}}});
  const Dataset values = group.dataset(second, Content::strings);
  values.expect_shape(std::array<Axis, 1>{{{"entries", keys.shape()[0]}}});
  const std::vector<std::string> key = keys.read_strings();
  const std::vector<std::string> value = values.read_strings();
  std::vector<std::pair<std::string, std::string>> pairs;
  for (std::size_t i = 0; i < key.size(); ++i) {
    pairs.emplace_back(key[i], value[i]);
  }
  return pairs;
}

StoredRun read_run(const Group& group, std::size_t traces) {
  StoredRun run;
  RunIdentity& identity = run.identity;
  identity.trace = group.integer("trace");
  identity.sequence_index = group.integer("sequence_index");
  identity.sequence = group.string("sequence");
  identity.policy = group.string("policy");
  const std::string lanes = group.string("lanes");
  if (identity.trace < 0 || identity.trace >= static_cast<Index>(traces)) {
    refuse(group.where(), ": trace is ", identity.trace, ", expected 0 .. ", traces - 1,
           "; write the run again");
  }
  if (identity.sequence_index < 0 || (lanes != "layer" && lanes != "kv_head")) {
    refuse(group.where(), ": sequence_index is ", identity.sequence_index, " and lanes is ", in_quotes(lanes),
           ", expected 0 or more, and 'layer' or 'kv_head'; write the run again");
  }
  run.lanes = lanes == "layer" ? LaneKind::layer : LaneKind::kv_head;
  identity.options = read_pairs(group, "option_key", "option_value");
  run.log.entries = read_log(Table(group.group("log")));
  run.log.pending = read_pending(Table(group.group("pending")));
  return run;
}

std::string read_manifest(const Group& root) {
  const Dataset manifest = root.dataset("manifest", Content::strings);
  manifest.expect_shape(std::array<Axis, 1>{{{"one", 1}}});
  return manifest.read_strings().front();
}

void check_root(const Group& root, const std::string& file) {
  if (!root.has_attribute("format") || root.string("format") != "hae-run") {
    refuse(file,
           ": not a run file (root attribute 'format' is not 'hae-run'); `hae replay --out` writes one");
  }
  if (root.integer("version") != kRunVersion) {
    refuse(file, ": run format version ", root.integer("version"), ", expected ", kRunVersion,
           "; read it with the hae that wrote it");
  }
  if (!root.has_attribute("complete") || root.integer("complete") != 1) {
    refuse(file,
           ": unfinished (root attribute 'complete' is not 1): its writer was stopped; write the run again");
  }
}

}  // namespace

struct RunWriter::File {
  explicit File(const std::filesystem::path& path) : out(path, "hae-run", kRunVersion) {}

  OutputFile out;
  Index runs = 0;
};

RunWriter::RunWriter(const std::filesystem::path& path, const std::string& manifest,
                     const std::vector<StoredTrace>& traces) {
  const Guard guard;
  file_ = std::make_unique<File>(path);
  const OutputFile& out = file_->out;
  out.write_strings(out.root().get(), "manifest", std::array{manifest});
  write_traces(out, traces);
  (void)out.create_group(out.root().get(), "runs");
}

RunWriter::~RunWriter() = default;

void RunWriter::add(const RunIdentity& identity, const RunResult& result) {
  HAE_EXPECTS(file_->runs < kMostNumbered);
  const Guard guard;
  const Handle runs(H5Gopen2(file_->out.root().get(), "runs", H5P_DEFAULT));
  file_->out.check(runs.valid() ? 0 : -1, "runs");
  write_run(file_->out, runs.get(), file_->runs++, identity, result);
}

void RunWriter::finish() {
  const Guard guard;
  file_->out.finish();
}

StoredRuns read_runs(const std::filesystem::path& path, bool lock) {
  const hdf5::File file(path, lock, false);
  return file.walk([&](const Group& root) {
    check_root(root, file.name());
    StoredRuns stored;
    stored.manifest = read_manifest(root);
    for (const auto& [trace, sha256] : read_pairs(root, "trace_path", "trace_sha256")) {
      stored.traces.push_back({trace, sha256});
    }
    const Group runs = root.group("runs");
    for (Index index = 0; index < runs.members(); ++index) {
      stored.runs.push_back(read_run(runs.group(six_digits(index)), stored.traces.size()));
    }
    return stored;
  });
}

}  // namespace hae::traces
