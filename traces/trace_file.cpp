#include "traces/trace_file.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "traces/float16.hpp"
#include "traces/hdf5.hpp"
#include "traces/layout.hpp"
#include "traces/message.hpp"

namespace hae::traces {
namespace {

using hdf5::Axis;
using hdf5::Content;
using hdf5::Dataset;
using hdf5::Group;

// ---- metadata

Index counted(const Group& group, const std::string& name, Index least, Index most) {
  const Index value = group.integer(name);
  if (value < least || value > most) {
    refuse(group.where(), ": ", name, " is ", value, ", expected ", least, " .. ", most, "; record it again");
  }
  return value;
}

std::vector<Index> per_token(const Group& group, const std::string& name, Index tokens) {
  const Dataset dataset = group.dataset(name, Content::integers);
  dataset.expect_shape(std::array<Axis, 1>{{{"tokens", tokens}}});
  return dataset.read_integers();
}

/// The picture of each token; `modality` must say the same.
std::vector<Index> read_images(const Group& group, Index tokens) {
  const std::vector<Index> modality = per_token(group, "modality", tokens);
  std::vector<Index> image = per_token(group, "image", tokens);
  for (std::size_t token = 0; token < image.size(); ++token) {
    if (modality[token] != 0 && modality[token] != 1) {
      refuse(group.where(), "/modality[", token, "]: found ", modality[token],
             ", expected 0 (text) or 1 (image); record it again");
    }
    if (image[token] < -1 || (image[token] >= 0) != (modality[token] == 1)) {
      refuse(group.where(), "/image[", token, "]: found ", image[token], ", expected ",
             modality[token] == 1 ? "a picture's number >= 0" : "-1", " because modality[", token, "] is ",
             modality[token], "; record it again");
    }
  }
  return image;
}

std::vector<Index> read_layer_integers(const Group& group, const std::string& name, Index layers,
                                       Index most) {
  const Dataset dataset = group.dataset(name, Content::integers);
  dataset.expect_shape(std::array<Axis, 1>{{{"layers", layers}}});
  std::vector<Index> values = dataset.read_integers();
  for (std::size_t layer = 0; layer < values.size(); ++layer) {
    if (values[layer] < 0 || values[layer] > most) {
      refuse(dataset.where(), "[", layer, "]: found ", values[layer], ", expected 0 .. ", most,
             "; record it again");
    }
  }
  return values;
}

std::vector<MaskRule> read_masks(const Group& group, Index layers) {
  std::vector<MaskRule> masks(static_cast<std::size_t>(layers));
  if (group.has("window")) {
    const std::vector<Index> windows = read_layer_integers(group, "window", layers, INT64_MAX);
    for (std::size_t layer = 0; layer < masks.size(); ++layer) {
      masks[layer].window = windows[layer];
    }
  }
  if (group.has("bidirectional")) {
    const std::vector<Index> rules = read_layer_integers(group, "bidirectional", layers, 2);
    for (std::size_t layer = 0; layer < masks.size(); ++layer) {
      masks[layer].bidirectional = static_cast<MaskRule::Bidirectional>(rules[layer]);
    }
  }
  return masks;
}

std::vector<Index> read_prompt_rows(const Group& group, const SequenceInfo& info) {
  if (info.payload == Payload::attention && group.has("prompt_rows")) {
    const Dataset dataset = group.dataset("prompt_rows", Content::integers);
    dataset.expect_shape(std::array<Axis, 1>{{{"rows", std::nullopt}}});
    return dataset.read_integers();
  }
  std::vector<Index> rows(static_cast<std::size_t>(info.prompt));
  std::iota(rows.begin(), rows.end(), Index{0});
  return rows;
}

Payload read_payload_kind(const Group& group) {
  const std::string kind = group.string("payload");
  if (kind != "qkv" && kind != "attention") {
    refuse(group.where(), ": payload is ", in_quotes(kind),
           ", expected 'qkv' or 'attention'; record it again");
  }
  return kind == "qkv" ? Payload::qkv : Payload::attention;
}

/// Everything but what the layers' datasets tell.
SequenceInfo read_attributes(const Group& group) {
  SequenceInfo info;
  info.name = group.string("name");
  info.group = group.has_attribute("group") ? group.string("group") : info.name;
  info.payload = read_payload_kind(group);
  info.layers = counted(group, "layers", 1, kMostNumbered);
  info.query_heads = counted(group, "query_heads", 1, kMostHeads);
  info.kv_heads = counted(group, "kv_heads", 1, info.query_heads);
  if (info.query_heads % info.kv_heads != 0) {
    refuse(group.where(), ": ", info.query_heads, " query heads do not divide by ", info.kv_heads,
           " KV heads, expected a multiple; record it again");
  }
  info.tokens = counted(group, "tokens", 1, kMostTokens);
  info.prompt = counted(group, "prompt", 1, info.tokens);
  info.generated = counted(group, "generated", 0, INT64_MAX);
  info.scale = group.real("scale");
  if (group.has_attribute("head_dim")) {
    info.head_dim = counted(group, "head_dim", 1, kMostDimensions);
  }
  return info;
}

// ---- payload

/// The most bytes of keys or values of one layer, as float32, that are copied out of chunks.
constexpr Index kLargestCopyBytes = Index{8} << 30;

Axis rows_axis(const SequenceInfo& info) {
  return {"rows", static_cast<Index>(info.prompt_rows.size())};
}

/// One layer's datasets, opened and checked. Those the payload has not are absent.
struct LayerDatasets {
  std::optional<Dataset> q, k, v, q_unrotated, prompt, decode;

  /// In a fixed order; nullptr where a dataset is absent.
  [[nodiscard]] std::array<const Dataset*, 6> all() const {
    const auto pointer = [](const std::optional<Dataset>& dataset) { return dataset ? &*dataset : nullptr; };
    return {pointer(q), pointer(k), pointer(v), pointer(q_unrotated), pointer(prompt), pointer(decode)};
  }
};

std::optional<Dataset> open_payload(const Group& layer, const char* name, std::span<const Axis> axes) {
  Dataset dataset = layer.dataset(name, Content::payload);
  dataset.expect_shape(axes);
  return dataset;
}

/// Keys and values that are packed in chunks are copied as a whole.
void check_copy(const Dataset& dataset) {
  if (dataset.storage() == hdf5::Storage::chunked && dataset.elements() > kLargestCopyBytes / 4) {
    refuse(dataset.where(), ": has ", dataset.elements(), " elements in chunks, expected at most ",
           kLargestCopyBytes / 4, "; write it contiguous");
  }
}

LayerDatasets open_datasets(const Group& layer, const SequenceInfo& info) {
  const std::array<Axis, 3> queries{
      {{"query_heads", info.query_heads}, {"tokens", info.tokens}, {"head_dim", info.head_dim}}};
  const std::array<Axis, 3> keys{
      {{"kv_heads", info.kv_heads}, {"tokens", info.tokens}, {"head_dim", info.head_dim}}};
  LayerDatasets open;
  if (info.payload == Payload::qkv) {
    open.q = open_payload(layer, "q", queries);
    open.k = open_payload(layer, "k", keys);
    check_copy(*open.k);
    if (layer.has("q_unrotated")) {
      open.q_unrotated = open_payload(layer, "q_unrotated", queries);
    }
  } else {
    const std::array<Axis, 3> rows{
        {{"query_heads", info.query_heads}, rows_axis(info), {"prompt", info.prompt}}};
    const std::array<Axis, 2> steps{
        {{"query_heads", info.query_heads}, {"decode entries", decode_length(info)}}};
    open.prompt = open_payload(layer, "prompt", rows);
    if (info.steps() > 0 || layer.has("decode")) {
      open.decode = open_payload(layer, "decode", steps);
    }
  }
  if (info.payload == Payload::qkv || layer.has("v")) {
    open.v = open_payload(layer, "v", keys);
    check_copy(*open.v);
  }
  return open;
}

Group layer_group(const Group& sequence, Index layer) {
  return sequence.group("layers").group(six_digits(layer));
}

/// Layers carry the same arrays in the same types: who reads a row knows its tolerance without asking for the
/// layer.
void check_alike(const LayerDatasets& first, const LayerDatasets& layer) {
  for (std::size_t i = 0; i < first.all().size(); ++i) {
    const Dataset* expected = first.all()[i];
    const Dataset* found = layer.all()[i];
    if ((expected == nullptr) != (found == nullptr)) {
      refuse((found != nullptr ? found : expected)->where(),
             ": some layers carry it and others do not, expected all or none; record it again");
    }
    if (found != nullptr && found->float_type() != expected->float_type()) {
      refuse(found->where(), ": found ", found->type_name(), ", expected ", expected->type_name(),
             " as in layer 000000; record it again");
    }
  }
}

Rotary read_rotary(const Group& group, const SequenceInfo& info) {
  const Group rotary = group.group("rotary");
  const Dataset frequency = rotary.dataset("inverse_frequency", Content::reals);
  frequency.expect_shape(std::array<Axis, 1>{{{"head_dim / 2", info.head_dim.value_or(0) / 2}}});
  return {frequency.read_reals(), counted(rotary, "interleaved", 0, 1) == 1};
}

void check_optional(const Group& group, const SequenceInfo& info) {
  const Axis tokens{"tokens", info.tokens};
  if (group.has("frame")) {
    group.dataset("frame", Content::integers).expect_shape(std::array{tokens});
  }
  if (group.has("patch")) {
    group.dataset("patch", Content::integers).expect_shape(std::array{tokens, Axis{"row and column", 2}});
  }
  if (group.has("token_id")) {
    group.dataset("token_id", Content::integers).expect_shape(std::array{tokens});
  }
  if (group.has("token")) {
    group.dataset("token", Content::strings).expect_shape(std::array{tokens});
  }
  if (group.has("position")) {
    const Dataset position = group.dataset("position", Content::integers);
    if (position.shape().size() == 1) {
      position.expect_shape(std::array{tokens});
    } else {
      position.expect_shape(std::array{tokens, Axis{"axes", std::nullopt}});
    }
  }
  if (group.has("embedding_similarity")) {
    const auto visual = std::count_if(info.image.begin(), info.image.begin() + info.prompt,
                                      [](Index image) { return image >= 0; });
    group.dataset("embedding_similarity", Content::reals)
        .expect_shape(std::array{Axis{"visual prompt tokens", visual},
                                 Axis{"text prompt tokens", info.prompt - visual}});
  }
}

/// The info of one sequence; every dataset of every layer has been opened once and fits it.
SequenceInfo read_info(const Group& group) {
  SequenceInfo info = read_attributes(group);
  const Group layers = group.group("layers");
  if (layers.members() != info.layers) {
    refuse(layers.where(), ": found ", layers.members(), " layers, expected layers = ", info.layers,
           "; the recording is incomplete: record it again");
  }
  info.image = read_images(group, info.tokens);
  info.masks = read_masks(group, info.layers);
  info.prompt_rows = read_prompt_rows(group, info);
  const Group first_group = layer_group(group, 0);
  info.has_values = info.payload == Payload::qkv || first_group.has("v");
  if (!info.head_dim && (info.payload == Payload::qkv || info.has_values)) {
    refuse(group.where(), ": attribute 'head_dim' is missing, expected the size of one key; record it again");
  }
  const LayerDatasets first = open_datasets(first_group, info);
  for (Index layer = 1; layer < info.layers; ++layer) {
    check_alike(first, open_datasets(layer_group(group, layer), info));
  }
  const Dataset& cached = first.k ? *first.k : first.v ? *first.v : *first.prompt;
  if (group.has_attribute("element_bytes")) {
    const Index bytes = group.integer("element_bytes");
    if (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8) {
      refuse(group.where(), ": element_bytes is ", bytes, ", expected 1, 2, 4 or 8; record it again");
    }
    info.element_bytes = bytes;
  } else if (info.head_dim) {
    info.element_bytes = bytes_of(cached.float_type());
  }
  if (first.prompt) {
    info.row_sum_tolerance = row_sum_tolerance(first.prompt->float_type());
  }
  if (first.q_unrotated) {
    info.rotary = read_rotary(group, info);
  }
  info.has_embedding_similarity = group.has("embedding_similarity");
  check_optional(group, info);
  check_info(info, group.where());
  return info;
}

// ---- reading

/// What is wrong with the first number that is not finite.
std::optional<std::string> find_not_finite(const Dataset& dataset, std::span<const double> numbers) {
  const auto bad = std::ranges::find_if_not(numbers, [](double x) { return std::isfinite(x); });
  if (bad == numbers.end()) {
    return std::nullopt;
  }
  return message(dataset.where(), ": element ", bad - numbers.begin(), " is ", *bad,
                 ", expected a finite number; record it again");
}

bool is_aligned(const std::byte* data) {
  return reinterpret_cast<std::uintptr_t>(data) % alignof(float) == 0;
}

class FileLayer final : public LayerPayload {
 public:
  /// similarity  of the sequence, for layer 0
  FileLayer(std::shared_ptr<const hdf5::File> file, const SequenceInfo& info, LayerDatasets datasets,
            std::optional<Dataset> similarity)
      : file_(std::move(file)),
        info_(info),
        datasets_(std::move(datasets)),
        similarity_(std::move(similarity)) {}

  View<const float, 3> keys() override {
    HAE_EXPECTS(info_.payload == Payload::qkv);
    return whole(*datasets_.k, keys_);
  }

  View<const float, 3> values() override {
    return datasets_.v ? whole(*datasets_.v, values_) : View<const float, 3>();
  }

  View<const double, 2> embedding_similarity() override {
    if (!similarity_) {
      return {};
    }
    if (similarities_.empty()) {
      similarities_ = similarity_->read_reals();
      if (const std::optional<std::string> complaint = find_not_finite(*similarity_, similarities_)) {
        throw TraceError(*complaint);
      }
    }
    return {similarities_.data(), {similarity_->shape()[0], similarity_->shape()[1]}};
  }

  void read_queries(Range rows, View<float, 3> out) override {
    HAE_EXPECTS(info_.payload == Payload::qkv);
    read_rows(*datasets_.q, rows, out);
  }

  void read_unrotated_queries(Range rows, View<float, 3> out) override {
    HAE_EXPECTS(info_.rotary.has_value());
    read_rows(*datasets_.q_unrotated, rows, out);
  }

  void read_prompt_attention(Range rows, View<float, 3> out) override {
    HAE_EXPECTS(info_.payload == Payload::attention);
    read_rows(*datasets_.prompt, rows, out);
  }

  void read_decode_attention(Index step, View<float, 2> out) override {
    HAE_EXPECTS(info_.payload == Payload::attention && step >= 1 && step <= info_.steps());
    const Index width = info_.prompt + step;
    HAE_EXPECTS(out.extent(0) == info_.query_heads && out.extent(1) == width);
    datasets_.decode->read(std::array<Index, 2>{0, decode_offset(info_.prompt, step)},
                           std::array<Index, 2>{info_.query_heads, width},
                           {out.data(), static_cast<std::size_t>(out.size())});
  }

 private:
  /// Every row of [heads, tokens, head_dim]: the mapped file itself where it can be, else a copy that is
  /// kept.
  View<const float, 3> whole(const Dataset& dataset, std::vector<float>& copy) {
    const std::array<Index, 3> shape{dataset.shape()[0], dataset.shape()[1], dataset.shape()[2]};
    const std::byte* mapped = dataset.mapped();
    if (mapped != nullptr && dataset.float_type() == FloatType::float32 && !dataset.swapped() &&
        is_aligned(mapped)) {
      return {reinterpret_cast<const float*>(mapped), shape};
    }
    if (copy.empty()) {
      copy.resize(static_cast<std::size_t>(dataset.elements()));
      dataset.read(std::array<Index, 3>{0, 0, 0}, shape, copy);
    }
    return {copy.data(), shape};
  }

  static void read_rows(const Dataset& dataset, Range rows, View<float, 3> out) {
    const std::vector<Index>& shape = dataset.shape();
    HAE_EXPECTS(rows.begin >= 0 && rows.begin <= rows.end && rows.end <= shape[1]);
    HAE_EXPECTS(out.extent(0) == shape[0] && out.extent(1) == rows.size() && out.extent(2) == shape[2]);
    dataset.read(std::array<Index, 3>{0, rows.begin, 0},
                 std::array<Index, 3>{shape[0], rows.size(), shape[2]},
                 {out.data(), static_cast<std::size_t>(out.size())});
  }

  std::shared_ptr<const hdf5::File> file_;  // before the datasets, which must be closed first
  SequenceInfo info_;
  LayerDatasets datasets_;
  std::optional<Dataset> similarity_;
  std::vector<float> keys_;
  std::vector<float> values_;
  std::vector<double> similarities_;
};

Group sequence_group(const Group& root, Index index) {
  return root.group("sequences").group(six_digits(index));
}

class FileSequence final : public Sequence {
 public:
  FileSequence(std::shared_ptr<const hdf5::File> file, Index index)
      : file_(std::move(file)), index_(index), info_(read_info(sequence_group(file_->root(), index))) {}

  const SequenceInfo& info() const override { return info_; }

  std::unique_ptr<LayerPayload> layer(Index layer) override {
    HAE_EXPECTS(layer >= 0 && layer < info_.layers);
    const Group group = sequence_group(file_->root(), index_);
    std::optional<Dataset> similarity;
    if (layer == 0 && info_.has_embedding_similarity) {
      similarity = group.dataset("embedding_similarity", Content::reals);
    }
    return std::make_unique<FileLayer>(file_, info_, open_datasets(layer_group(group, layer), info_),
                                       std::move(similarity));
  }

 private:
  std::shared_ptr<const hdf5::File> file_;
  Index index_;
  SequenceInfo info_;
};

std::string optional_string(const Group& group, const std::string& name) {
  return group.has_attribute(name) ? group.string(name) : "";
}

void check_root(const Group& root, const std::string& file) {
  if (!root.has_attribute("format") || root.string("format") != "hae-trace") {
    refuse(
        file,
        ": an HDF5 file that is not a trace (root attribute 'format' is not 'hae-trace'); other formats go ",
        "through `hae import`");
  }
  const Index version = root.integer("version");
  if (version != kFormatVersion) {
    refuse(file, ": trace format version ", version, ", expected ", kFormatVersion,
           version > kFormatVersion ? "; read it with a newer hae" : "; record it again");
  }
  if (!root.has_attribute("complete") || root.integer("complete") != 1) {
    refuse(file,
           ": unfinished (root attribute 'complete' is not 1): its writer was stopped; record it again, or ",
           "join the parts that were finished");
  }
}

std::vector<std::string> read_sequence_names(const Group& sequences) {
  const Index count = sequences.members();
  if (count < 1 || count > kMostNumbered) {
    refuse(sequences.where(), ": found ", count, " sequences, expected 1 .. ", kMostNumbered,
           "; record it again");
  }
  std::vector<std::string> names;
  std::set<std::string> seen;
  for (Index index = 0; index < count; ++index) {
    if (!sequences.has(six_digits(index))) {
      refuse(sequences.where(), ": has ", count, " members but no ", six_digits(index),
             ", expected 000000 and up without gaps; record it again");
    }
    const Group sequence = sequences.group(six_digits(index));
    names.push_back(sequence.string("name"));
    if (!seen.insert(names.back()).second) {
      refuse(sequence.where(), ": its name ", in_quotes(names.back()),
             " is taken by another sequence, expected unique names; record it again");
    }
  }
  return names;
}

SequenceDetails read_details(const Group& group, Index tokens) {
  SequenceDetails details;
  details.model = optional_string(group, "model");
  details.attention_implementation = optional_string(group, "attention_implementation");
  if (group.has("frame")) {
    details.frame = per_token(group, "frame", tokens);
  }
  if (group.has("patch")) {
    const std::vector<Index> flat = group.dataset("patch", Content::integers).read_integers();
    for (std::size_t token = 0; token < flat.size() / 2; ++token) {
      details.patch.push_back({flat[2 * token], flat[2 * token + 1]});
    }
  }
  if (group.has("position")) {
    const Dataset position = group.dataset("position", Content::integers);
    details.position = position.read_integers();
    details.position_axes = position.shape().size() == 1 ? 1 : position.shape()[1];
  }
  if (group.has("token_id")) {
    details.token_id = per_token(group, "token_id", tokens);
  }
  if (group.has("token")) {
    details.token = group.dataset("token", Content::strings).read_strings();
  }
  return details;
}

/// The image ids whose picture is stored, ascending.
std::vector<Index> read_pictures(const Group& group, const SequenceInfo& info) {
  if (!group.has("pictures")) {
    return {};
  }
  const Group pictures = group.group("pictures");
  const std::set<Index> images(info.image.begin(), info.image.end());
  std::vector<Index> stored;
  for (const Index image : images) {
    if (image >= 0 && pictures.has(text(image))) {
      const Dataset picture = pictures.dataset(text(image), Content::bytes);
      const Axis height{"height", std::nullopt};
      const Axis width{"width", std::nullopt};
      if (picture.shape().size() == 2) {
        picture.expect_shape(std::array{height, width});
      } else {
        picture.expect_shape(std::array{height, width, Axis{"channels", std::nullopt}});
      }
      stored.push_back(image);
    }
  }
  return stored;
}

/// The frequencies of the rotary embedding, where there are any.
std::optional<Dataset> open_frequencies(const Group& group) {
  if (!group.has("rotary")) {
    return std::nullopt;
  }
  return group.group("rotary").dataset("inverse_frequency", Content::reals);
}

/// Reads every piece of a sequence's metadata once. What is wrong with an optional piece is said to who asks
/// for it.
void read_all_metadata(const Group& group) {
  const SequenceInfo info = read_info(group);
  const auto attempt = [](auto read) {
    try {
      static_cast<void>(read());
    } catch (const TraceError&) {
    }
  };
  attempt([&] { return read_details(group, info.tokens); });
  attempt([&] { return read_pictures(group, info); });
  attempt([&] { return open_frequencies(group); });
}

}  // namespace

TraceFile::TraceFile(const std::filesystem::path& path, OpenOptions options)
    : file_(std::make_shared<hdf5::File>(path, options.lock, options.memory_map)) {
  file_->walk([&](const Group& root) {
    check_root(root, file_->name());
    origin_ = {optional_string(root, "recorder"), optional_string(root, "libraries"),
               optional_string(root, "command")};
    sequence_names_ = read_sequence_names(root.group("sequences"));
  });
  met_.resize(sequence_names_.size());
}

TraceFile::~TraceFile() = default;

Index TraceFile::sequences() const {
  return static_cast<Index>(sequence_names_.size());
}

/// Reads all metadata of these sequences in a child process.
void TraceFile::rehearse(Range sequences) const {
  file_->rehearse([&](const Group& root) {
    for (Index index = sequences.begin; index < sequences.end; ++index) {
      read_all_metadata(sequence_group(root, index));
    }
  });
  std::fill(met_.begin() + sequences.begin, met_.begin() + sequences.end, true);
}

/// Every public call on a sequence begins here. A child costs more than a small sequence does, so children
/// read twice as many sequences each time; one that fails tells nothing about the sequence that was asked
/// for, which gets a child of its own.
void TraceFile::meet(Index index) const {
  HAE_EXPECTS(index >= 0 && index < sequences());
  const hdf5::Guard guard;
  if (met_[static_cast<std::size_t>(index)]) {
    return;
  }
  if (batch_ > 1) {
    try {
      rehearse({index, std::min(index + batch_, sequences())});
      batch_ *= 2;
      return;
    } catch (const TraceError&) {
      batch_ = 1;
    }
  }
  rehearse({index, index + 1});
  batch_ *= 2;
}

std::unique_ptr<Sequence> TraceFile::open(Index index) {
  meet(index);
  return std::make_unique<FileSequence>(file_, index);
}

std::string TraceFile::name() const {
  return file_->name();
}

Index TraceFile::bytes() const {
  return file_->bytes();
}

SequenceDetails TraceFile::details(Index index) const {
  meet(index);
  const Group group = sequence_group(file_->root(), index);
  return read_details(group, read_info(group).tokens);
}

std::vector<std::string> TraceFile::optional_violations(Index index) const {
  meet(index);
  const Group group = sequence_group(file_->root(), index);
  const SequenceInfo info = read_info(group);
  const SequenceDetails details = this->details(index);
  std::vector<std::string> violations;
  for (std::size_t token = 0; token < details.frame.size(); ++token) {
    const Index frame = details.frame[token];
    if (frame < -1 || (frame >= 0 && !info.is_visual(static_cast<Index>(token)))) {
      violations.push_back(message(group.where(), "/frame[", token, "]: found ", frame,
                                   ", expected -1 for text and 0 or more for a frame; record it again"));
      break;
    }
  }
  for (std::size_t token = 0; token < details.patch.size(); ++token) {
    const auto [row, column] = details.patch[token];
    const bool has_none = row == -1 && column == -1;
    if (!has_none && (row < 0 || column < 0 || !info.is_visual(static_cast<Index>(token)))) {
      violations.push_back(message(group.where(), "/patch[", token, "]: found ", row, " ", column,
                                   ", expected -1 -1 for text, else a row and a column; record it again"));
      break;
    }
  }
  const auto expect_finite = [&](const Dataset& dataset, std::span<const double> numbers) {
    if (std::optional<std::string> complaint = find_not_finite(dataset, numbers)) {
      violations.push_back(*std::move(complaint));
    }
  };
  if (group.has("embedding_similarity")) {
    const Dataset similarity = group.dataset("embedding_similarity", Content::reals);
    expect_finite(similarity, similarity.read_reals());
  }
  if (const std::optional<Dataset> frequencies = open_frequencies(group)) {
    expect_finite(*frequencies, frequencies->read_reals());
  }
  for (Index layer = 0; layer < info.layers; ++layer) {
    const LayerDatasets datasets = open_datasets(group.group("layers").group(six_digits(layer)), info);
    for (Index head = 0; datasets.q_unrotated && head < info.query_heads; ++head) {
      std::vector<float> numbers(static_cast<std::size_t>(info.tokens * *info.head_dim));
      const std::array<Index, 3> start{head, 0, 0};
      const std::array<Index, 3> count{1, info.tokens, *info.head_dim};
      datasets.q_unrotated->read(start, count, numbers);
      expect_finite(*datasets.q_unrotated, std::vector<double>(numbers.begin(), numbers.end()));
    }
  }
  try {
    static_cast<void>(pictures(index));
  } catch (const TraceError& error) {
    violations.emplace_back(error.what());
  }
  return violations;
}

std::vector<Index> TraceFile::pictures(Index index) const {
  meet(index);
  const Group group = sequence_group(file_->root(), index);
  return read_pictures(group, read_info(group));
}

std::vector<StoredDataset> TraceFile::datasets(Index index) const {
  meet(index);
  const Group group = sequence_group(file_->root(), index);
  const SequenceInfo info = read_info(group);
  std::vector<StoredDataset> stored;
  const auto add = [&](const Dataset& dataset) {
    std::vector<std::string> filters;
    for (const Filter& filter : dataset.filters()) {
      filters.emplace_back(name_of(filter.kind));
    }
    stored.push_back({dataset.where().substr(group.where().size() + 1), dataset.type_name(), dataset.shape(),
                      dataset.chunk(), filters, dataset.declared_bytes(), dataset.stored_bytes()});
  };
  for (const char* name : {"modality", "image", "frame", "patch", "position", "token_id", "window",
                           "bidirectional", "prompt_rows"}) {
    if (group.has(name)) {
      add(group.dataset(name, Content::integers));
    }
  }
  if (group.has("token")) {
    add(group.dataset("token", Content::strings));
  }
  if (group.has("embedding_similarity")) {
    add(group.dataset("embedding_similarity", Content::reals));
  }
  for (const Index picture : pictures(index)) {
    add(group.group("pictures").dataset(text(picture), Content::bytes));
  }
  for (Index layer = 0; layer < info.layers; ++layer) {
    const LayerDatasets open = open_datasets(layer_group(group, layer), info);
    for (const Dataset* dataset : open.all()) {
      if (dataset != nullptr) {
        add(*dataset);
      }
    }
  }
  return stored;
}

}  // namespace hae::traces
