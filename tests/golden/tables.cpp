#include "tests/golden/tables.hpp"

#include <stdlib.h>  // mkdtemp

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <fstream>
#include <memory>
#include <span>
#include <string_view>

#include "reference/policies.hpp"
#include "sim/cli/sha256.hpp"
#include "sim/errors.hpp"
#include "sim/replay.hpp"
#include "sim/text.hpp"
#include "sim/weights.hpp"
#include "tests/golden/cases.hpp"
#include "traces/synth.hpp"
#include "traces/trace_file.hpp"

namespace hae::testing {
namespace {

namespace fs = std::filesystem;

static_assert(std::endian::native == std::endian::little, "the tables hash little-endian numbers");

/// Each option of each policy, in at least one of its values that is not the default.
constexpr std::array kRecordingSpecs = {
    "full",
    "hae:budget=96",
    "hae:r=0.007,alpha=0.008",
    "hae:r=0.007,alpha=0.008,bin=8,budget=64",
    "hae:r=0.02,alpha=0.05,ddes=batch,budget=64,bin=16,lane=kv_head,group=max",
    "hae:budget=80,bin=20%,sinks=4,score=mean,scores=full",
    "hae:dap=mass,eps=0.05,ddes=none",
    "hae:dap=mass,eps=0.2,alpha=0.1,heads=max,scope=image,budget=72",
    "hae:r=0.02,alpha=0.02,broadcast=none,budget=64,recent=8",
    "hae:r=0.02,alpha=0.02,max_evicted=32,effect=after,budget=64",
    "greedy:budget=64",
    "greedy:dap=threshold,r=0.007,alpha=0.008,budget=48,scores=full",
    "greedy:budget=64,sinks=2,recent=16,lane=kv_head,group=sum,score=mean",
    "h2o/layerwise:budget=64",
    "h2o/layerwise:budget=64,recent=8,lane=layer",
    "window:sinks=4,budget=64",
    "random:budget=64,seed=7,lane=kv_head",
};

constexpr std::array kSyntheticSpecs = {
    "hae:r=0.05,alpha=0.5,budget=20,bin=4",
    "hae:r=0.05,alpha=0.5,ddes=batch,budget=20,bin=6,lane=kv_head,group=max,score=mean",
    "hae:dap=mass,eps=0.1,budget=24,sinks=2,scores=full",
    "greedy:budget=20",
    "greedy:budget=20,lane=kv_head,group=sum,score=mean,scores=full",
    "h2o/layerwise:budget=16",
    "random:budget=20,seed=1",
};

/// One sequence of the tables.
struct Subject {
  std::string trace;
  Index index;
  Sequence& sequence;
  std::span<const char* const> specs;
};
using Visit = std::function<void(const Subject&)>;

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (fs::temp_directory_path() / "hae-golden-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) {
      throw OutputError(pattern + ": the folder cannot be made; set TMPDIR to one that can be written");
    }
    path_ = pattern;
  }
  ~TemporaryFolder() { fs::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  [[nodiscard]] const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

void visit_recordings(const GoldenOptions& options, const Visit& visit) {
  for (const char* name : {"boards-test.h5", "validation/boards-validation.h5"}) {
    traces::TraceFile file(options.root / "traces/data" / name);
    for (Index i = 0; i < file.sequences(); i += options.every) {
      visit({name, i, *file.open(i), kRecordingSpecs});
    }
  }
}

/// What `hae synth` writes: the numbers, their 16-bit codes and the file are under test too.
void visit_synthetic_files(const Visit& visit) {
  const TemporaryFolder folder;
  Index next_type = 0;
  for (const std::string& kind : traces::synth_kind_names()) {
    constexpr std::array kTypes = {traces::FloatType::float32, traces::FloatType::float16,
                                   traces::FloatType::bfloat16};
    traces::SynthOptions options{.kind = traces::parse_synth_kind(kind),
                                 .layers = 2,
                                 .query_heads = 4,
                                 .kv_heads = 2,
                                 .head_dim = 8,
                                 .prompt = 48,
                                 .tokens = 80,
                                 .image_tokens = 24,
                                 .seed = 3,
                                 .type = kTypes[static_cast<std::size_t>(next_type++) % kTypes.size()]};
    const fs::path path = folder.path() / (kind + ".h5");
    traces::write_synthetic_trace(path, options);
    traces::TraceFile file(path);
    visit({"synth-" + kind + "-" + traces::name_of(options.type), 0, *file.open(0), kSyntheticSpecs});
  }
}

void visit_all(const GoldenOptions& options, const Visit& visit) {
  visit_recordings(options, visit);
  visit_synthetic_files(visit);
  for (const GoldenCase& example : golden_cases()) {
    MemorySequence sequence(example.trace);
    visit({example.name, 0, sequence, kSyntheticSpecs});
  }
}

template <typename Number>
std::string_view bytes_of(std::span<const Number> numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size_bytes()};
}

std::string join(const std::vector<std::string>& fields) {
  std::string line;
  for (const std::string& field : fields) {
    line += (line.empty() ? "" : "\t") + field;
  }
  return line;
}

std::vector<std::string> split(std::string_view line) {
  std::vector<std::string> fields;
  while (true) {
    const std::size_t tab = line.find('\t');
    fields.emplace_back(line.substr(0, tab));
    if (tab == std::string_view::npos) {
      return fields;
    }
    line.remove_prefix(tab + 1);
  }
}

std::string mean_of(const Series& series, Metric metric) {
  const std::optional<Summary> summary = summarise(series.all(metric));
  return summary ? shortest(summary->mean) : "-";
}

std::string total_of(std::span<const double> masses) {
  double total = 0.0;
  for (const double m : masses) {
    total += std::isnan(m) ? 0.0 : m;
  }
  return masses.empty() ? "-" : shortest(total);
}

std::string run_line(const Subject& subject, const Policy& policy, const RunResult& run) {
  const std::span<const double> masses = run.decode.all(Metric::missed_mass);
  return join({subject.trace, std::to_string(subject.index), policy.spec(),
               std::to_string(run.log.entries.size()), std::to_string(run.log.pending.size()),
               cli::sha256(to_json_lines(run.log)), cli::sha256(bytes_of(masses)), total_of(masses),
               mean_of(run.decode, Metric::missed_mass), mean_of(run.decode, Metric::output_error)});
}

/// Appends the weights and the sum of each row of a block.
void append_rows(const WeightBlock& block, std::string& bytes) {
  for (Index h = 0; h < block.query_heads; ++h) {
    for (Index r = 0; r < block.rows(); ++r) {
      const auto keys = static_cast<std::size_t>(block.visible[static_cast<std::size_t>(r)].back().end);
      bytes += bytes_of(std::span(block.row(h, r), keys));
      const float sum = block.sum(h, r);
      bytes += bytes_of(std::span(&sum, 1));
    }
  }
}

void add_weights(const Subject& subject, std::vector<std::string>& lines) {
  const SequenceInfo& info = subject.sequence.info();
  std::string prompt;
  std::string decode;
  for (Index layer = 0; layer < info.layers; ++layer) {
    const std::unique_ptr<LayerPayload> payload = subject.sequence.layer(layer);
    LayerWeights weights(info, layer, info.tokens, *payload, NanRule::error, subject.trace);
    WeightBlock block;
    weights.prompt({0, static_cast<Index>(info.prompt_rows.size())}, block);
    append_rows(block, prompt);
    if (info.steps() > 0) {
      weights.decode({1, info.steps() + 1}, block);
      append_rows(block, decode);
    }
  }
  const std::string index = std::to_string(subject.index);
  lines.push_back(join({subject.trace, index, "prompt", cli::sha256(prompt)}));
  lines.push_back(join({subject.trace, index, "decode", cli::sha256(decode)}));
}

bool same_key(const std::vector<std::string>& a, const std::vector<std::string>& b) {
  return static_cast<Index>(std::min(a.size(), b.size())) >= GoldenTable::kKeyColumns &&
         std::equal(a.begin(), a.begin() + GoldenTable::kKeyColumns, b.begin());
}

std::string describe_difference(const std::vector<std::string>& columns,
                                const std::vector<std::string>& committed,
                                const std::vector<std::string>& made) {
  const std::string where = made[0] + ", sequence " + made[1] + ", " + made[2] + ": ";
  if (committed.size() != made.size() || columns.size() != made.size()) {
    return where + std::to_string(made.size()) + " columns, expected " + std::to_string(committed.size());
  }
  const auto [old, now] = std::ranges::mismatch(committed, made);
  return where + columns[static_cast<std::size_t>(old - committed.begin())] + " is " + *now + ", expected " +
         *old;
}

}  // namespace

GoldenTable golden_runs(const GoldenOptions& options) {
  GoldenTable table;
  table.lines.push_back(
      join({"trace", "sequence", "policy", "evictions", "pending", "log_sha256", "missed_mass_sha256",
            "missed_mass_total", "missed_mass_mean", "output_error_mean"}));
  visit_all(options, [&](const Subject& subject) {
    std::vector<std::shared_ptr<const Policy>> policies;
    for (const char* spec : subject.specs) {
      policies.push_back(reference::make_policy(spec));
    }
    const std::vector<RunResult> runs = replay(subject.sequence, policies, {}, subject.trace);
    for (std::size_t i = 0; i < runs.size(); ++i) {
      table.lines.push_back(run_line(subject, *policies[i], runs[i]));
    }
  });
  return table;
}

GoldenTable golden_weights(const GoldenOptions& options) {
  GoldenTable table;
  table.lines.push_back(join({"trace", "sequence", "rows", "sha256"}));
  visit_all(options, [&](const Subject& subject) { add_weights(subject, table.lines); });
  return table;
}

const std::vector<GoldenFile>& golden_files() {
  static const std::vector<GoldenFile> files = {{"tests/golden/runs.tsv", golden_runs},
                                                {"tests/golden/weights.tsv", golden_weights}};
  return files;
}

GoldenTable read_golden(const fs::path& path) {
  std::ifstream file(path);
  if (!file) {
    throw TraceError(path.string() + ": cannot be read; script/golden makes it");
  }
  GoldenTable table;
  for (std::string line; std::getline(file, line);) {
    table.lines.push_back(line);
  }
  return table;
}

void write_golden(const GoldenTable& table, const fs::path& path) {
  std::ofstream file(path);
  for (const std::string& line : table.lines) {
    file << line << '\n';
  }
  if (!file.flush()) {
    throw OutputError(path.string() + ": cannot be written; check the path and its permissions");
  }
}

std::optional<std::string> first_difference(const GoldenTable& committed, const GoldenTable& made) {
  auto place = committed.lines.begin();
  for (const std::string& line : made.lines) {
    const std::vector<std::string> fields = split(line);
    place = std::find_if(place, committed.lines.end(),
                         [&](const std::string& other) { return same_key(split(other), fields); });
    if (place == committed.lines.end()) {
      return fields[0] + ", sequence " + fields[1] + ", " + fields[2] +
             ": no such line in the committed table, or not in this place";
    }
    if (*place != line) {
      return describe_difference(split(committed.lines.front()), split(*place), fields);
    }
    ++place;
  }
  return std::nullopt;
}

}  // namespace hae::testing
