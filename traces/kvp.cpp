#include "traces/kvp.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "sim/trace.hpp"
#include "traces/import_steps.hpp"
#include "traces/layout.hpp"
#include "traces/message.hpp"
#include "traces/safetensors.hpp"
#include "traces/trace_writer.hpp"

namespace hae::traces {
namespace {

namespace fs = std::filesystem;

constexpr Numbering kLayers{.prefix = "layer_", .digits = 6, .most = kMostNumbered};
constexpr Numbering kKvHeads{.prefix = "kv_head_", .digits = 3, .most = kMostHeads};
constexpr std::array<const char*, 3> kTensors{"k", "q_group", "v"};

/// The numbers of a directory's members; those without the prefix belong to somebody else.
std::vector<Index> numbered_members(const fs::path& directory, const Numbering& numbering) {
  std::error_code error;
  if (!fs::is_directory(directory, error)) {
    refuse(directory.string(), fs::exists(directory, error) ? ": is not a directory" : ": no such directory",
           ", expected one with ", numbering.name(0), "; check the path");
  }
  std::vector<std::string> names;
  fs::directory_iterator member(directory, error);
  for (; !error && member != fs::directory_iterator(); member.increment(error)) {
    if (std::string name = member->path().filename().string(); name.starts_with(numbering.prefix)) {
      names.push_back(std::move(name));
    }
  }
  if (error) {
    refuse(directory.string(), ": cannot be listed (", error.message(), "); check its permissions");
  }
  return numbers_of(numbering, names, directory.string());
}

/// `a/b`, `a/b/` and `.` all have a last name.
std::string last_name(const fs::path& directory) {
  const fs::path whole = fs::absolute(directory).lexically_normal();
  return (whole.has_filename() ? whole : whole.parent_path()).filename().string();
}

class Importer {
 public:
  Importer(fs::path from, const KvpOptions& options) : from_(std::move(from)), options_(options) {}

  void run(const fs::path& to) {
    read_structure();
    apply_options();
    TraceWriter writer(to, options_.sequence.origin);
    writer.begin_sequence(info_, {}, type_);
    for (Index layer = 0; layer < info_.layers; ++layer) {
      for (Index kv_head = 0; kv_head < info_.kv_heads; ++kv_head) {
        copy_kv_head(writer, layer, kv_head);
      }
    }
    writer.finish();
  }

 private:
  [[nodiscard]] fs::path layer_path(Index layer) const { return from_ / kLayers.name(layer); }

  /// Opens every file once: what is missing or of another shape is found before anything is written.
  void read_structure() {
    info_.payload = Payload::qkv;
    info_.has_values = true;
    info_.layers = count_numbered(kLayers, numbered_members(from_, kLayers), from_.string());
    for (Index layer = 0; layer < info_.layers; ++layer) {
      const std::string where = layer_path(layer).string();
      const std::vector<Index> kv_heads = numbered_members(layer_path(layer), kKvHeads);
      if (layer == 0) {
        info_.kv_heads = count_numbered(kKvHeads, kv_heads, where);
        read_shape(open_tensors(0, 0));
      }
      expect_numbered(kKvHeads, kv_heads, info_.kv_heads, where);
      for (Index kv_head = 0; kv_head < info_.kv_heads; ++kv_head) {
        check_alike(open_tensors(layer, kv_head));
      }
    }
  }

  /// A file with the three tensors; another one, perhaps misspelt, would be left out in silence.
  [[nodiscard]] SafetensorsFile open_tensors(Index layer, Index kv_head) const {
    SafetensorsFile file(layer_path(layer) / kKvHeads.name(kv_head) / "attention_tensors.safetensors");
    for (const auto& [name, tensor] : file.tensors()) {
      if (std::find(kTensors.begin(), kTensors.end(), name) == kTensors.end()) {
        refuse(file.name(), ": holds ", in_quotes(name), ", expected only q_group, k and v; save it again");
      }
    }
    for (const char* name : kTensors) {
      if (!file.tensors().contains(name)) {
        refuse(file.name(), ":/", name, ": missing, expected q_group, k and v; save it again");
      }
    }
    return file;
  }

  void read_shape(const SafetensorsFile& first) {
    const SafetensorsTensor& q_group = first.tensors().at("q_group");
    if (q_group.shape.size() != 3 || std::count(q_group.shape.begin(), q_group.shape.end(), 0) != 0) {
      refuse(first.name(), ":/q_group: found shape ", q_group.shape,
             ", expected [group, tokens, head_dim] of at least 1 each; save it again");
    }
    group_ = q_group.shape[0];
    info_.tokens = q_group.shape[1];
    info_.head_dim = q_group.shape[2];
    type_ = q_group.type;
    info_.element_bytes = bytes_of(type_);
    info_.query_heads = info_.kv_heads * std::min(group_, kMostHeads + 1);
    check_limits(info_, from_.string());
  }

  void check_alike(const SafetensorsFile& file) const {
    const std::vector<Index> queries{group_, info_.tokens, *info_.head_dim};
    const std::vector<Index> keys{info_.tokens, *info_.head_dim};
    for (const auto& [name, tensor] : file.tensors()) {
      const std::vector<Index>& expected = name == "q_group" ? queries : keys;
      if (tensor.shape != expected) {
        refuse(file.name(), ":/", name, ": found shape ", tensor.shape, ", expected ", expected,
               " to go with the first file's q_group; record all heads at once");
      }
      if (tensor.type != type_) {
        refuse(file.name(), ":/", name, ": found ", name_of(tensor.type), ", expected ", name_of(type_),
               " like the first file's q_group; save all of them with one type");
      }
    }
  }

  void apply_options() {
    info_.scale = options_.scale.value_or(default_scale(info_));
    if (!std::isfinite(info_.scale)) {
      throw ConfigError("scale is not finite, expected what q.k is multiplied with");
    }
    if (options_.window < 0) {
      throw ConfigError(message("window is ", options_.window, ", expected 0 (none) or more"));
    }
    info_.masks.assign(static_cast<std::size_t>(info_.layers), {.window = options_.window});
    apply(options_.sequence, last_name(from_), info_);
    check_info(info_, from_.string());
  }

  void copy_kv_head(TraceWriter& writer, Index layer, Index kv_head) {
    SafetensorsFile file = open_tensors(layer, kv_head);
    check_alike(file);
    head_values_.resize(static_cast<std::size_t>(info_.tokens * *info_.head_dim));
    const auto copy = [&](const char* name, Index first, LayerArray array, Index head, const auto&... place) {
      file.read(file.tensors().at(name), first, head_values_);
      write_finite_head(writer, info_, layer, array, head, head_values_,
                        message(file.name(), ":/", name, "[", place...));
    };
    for (Index i = 0; i < group_; ++i) {
      const Index first = i * info_.tokens * *info_.head_dim;
      copy("q_group", first, LayerArray::queries, kv_head * group_ + i, i, ", ");
    }
    copy("k", 0, LayerArray::keys, kv_head);
    copy("v", 0, LayerArray::values, kv_head);
  }

  fs::path from_;
  const KvpOptions& options_;
  SequenceInfo info_;
  Index group_ = 0;  ///< query heads of one KV head
  FloatType type_ = FloatType::float32;
  std::vector<float> head_values_;
};

}  // namespace

void import_kvp(const fs::path& from, const fs::path& to, const KvpOptions& options) {
  Importer(from, options).run(to);
}

}  // namespace hae::traces
