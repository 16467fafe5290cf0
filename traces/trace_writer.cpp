#include "traces/trace_writer.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "traces/hdf5_output.hpp"
#include "traces/layout.hpp"
#include "traces/message.hpp"

namespace hae::traces {
namespace {

using hdf5::Guard;
using hdf5::Handle;
using hdf5::write_attribute;

constexpr std::array kArrays{LayerArray::queries, LayerArray::keys, LayerArray::values, LayerArray::prompt,
                             LayerArray::decode};

const char* name_of(LayerArray array) {
  switch (array) {
    case LayerArray::queries:
      return "q";
    case LayerArray::keys:
      return "k";
    case LayerArray::values:
      return "v";
    case LayerArray::prompt:
      return "prompt";
    case LayerArray::decode:
      return "decode";
  }
  return "";
}

/// The shape of an array, or nothing when the sequence has none.
std::optional<std::vector<hsize_t>> shape_of(LayerArray array, const SequenceInfo& info) {
  const auto size = [](Index value) { return static_cast<hsize_t>(value); };
  const bool qkv = info.payload == Payload::qkv;
  const hsize_t tokens = size(info.tokens);
  const hsize_t head_dim = size(info.head_dim.value_or(0));
  switch (array) {
    case LayerArray::queries:
      return qkv ? std::optional(std::vector{size(info.query_heads), tokens, head_dim}) : std::nullopt;
    case LayerArray::keys:
      return qkv ? std::optional(std::vector{size(info.kv_heads), tokens, head_dim}) : std::nullopt;
    case LayerArray::values:
      return info.has_values ? std::optional(std::vector{size(info.kv_heads), tokens, head_dim})
                             : std::nullopt;
    case LayerArray::prompt:
      return qkv ? std::nullopt
                 : std::optional(std::vector<hsize_t>{size(info.query_heads), info.prompt_rows.size(),
                                                      size(info.prompt)});
    case LayerArray::decode:
      return qkv ? std::nullopt
                 : std::optional(std::vector{size(info.query_heads), size(decode_length(info))});
  }
  return std::nullopt;
}

}  // namespace

class TraceWriter::File {
 public:
  File(const std::filesystem::path& path, const TraceOrigin& origin);
  void begin_sequence(const SequenceInfo& info, const SequenceDetails& details, FloatType type);
  void write_head(Index layer, LayerArray array, Index head, std::span<const float> values);
  void finish();

 private:
  struct Array {
    Handle dataset;
    std::vector<hsize_t> shape;
    std::vector<bool> written;  ///< [heads]
  };

  void write_attributes(hid_t group, const SequenceInfo& info, const SequenceDetails& details) const;
  void write_tokens(hid_t group, const SequenceInfo& info) const;
  void write_details(hid_t group, const SequenceInfo& info, const SequenceDetails& details) const;
  void create_layers(hid_t group);
  void end_sequence();
  [[nodiscard]] std::size_t place(Index layer, LayerArray array) const {
    return static_cast<std::size_t>(layer) * kArrays.size() + static_cast<std::size_t>(array);
  }

  hdf5::OutputFile output_;
  Handle sequences_;
  Index count_ = 0;
  std::vector<std::string> names_;
  SequenceInfo info_;
  FloatType type_ = FloatType::float32;
  std::vector<Array> arrays_;  ///< [layers * kArrays.size()]; without a shape: not part of the payload
  std::vector<std::byte> codes_;
};

TraceWriter::File::File(const std::filesystem::path& path, const TraceOrigin& origin)
    : output_(path, "hae-trace", kFormatVersion) {
  const Guard guard;
  const hid_t root = output_.root().get();
  write_attribute(root, "recorder", origin.recorder);
  write_attribute(root, "libraries", origin.libraries);
  write_attribute(root, "command", origin.command);
  sequences_ = output_.create_group(root, "sequences");
}

void TraceWriter::File::write_attributes(hid_t group, const SequenceInfo& info,
                                         const SequenceDetails& details) const {
  write_attribute(group, "name", info.name);
  write_attribute(group, "group", info.group);
  write_attribute(group, "payload", std::string(info.payload == Payload::qkv ? "qkv" : "attention"));
  write_attribute(group, "layers", info.layers);
  write_attribute(group, "query_heads", info.query_heads);
  write_attribute(group, "kv_heads", info.kv_heads);
  if (info.head_dim) {
    write_attribute(group, "head_dim", *info.head_dim);
  }
  if (info.element_bytes) {
    write_attribute(group, "element_bytes", *info.element_bytes);
  }
  write_attribute(group, "tokens", info.tokens);
  write_attribute(group, "prompt", info.prompt);
  write_attribute(group, "generated", info.generated);
  write_attribute(group, "scale", info.scale);
  write_attribute(group, "model", details.model);
  write_attribute(group, "attention_implementation", details.attention_implementation);
}

void TraceWriter::File::write_tokens(hid_t group, const SequenceInfo& info) const {
  std::vector<Index> modality;
  for (const Index image : info.image) {
    modality.push_back(image >= 0 ? 1 : 0);
  }
  output_.write_integers(group, "modality", modality);
  output_.write_integers(group, "image", info.image);
  std::vector<Index> window;
  std::vector<Index> bidirectional;
  for (const MaskRule& mask : info.masks) {
    window.push_back(mask.window);
    bidirectional.push_back(static_cast<Index>(mask.bidirectional));
  }
  output_.write_integers(group, "window", window);
  output_.write_integers(group, "bidirectional", bidirectional);
  if (info.payload == Payload::attention) {
    output_.write_integers(group, "prompt_rows", info.prompt_rows);
  }
}

void TraceWriter::File::write_details(hid_t group, const SequenceInfo& info,
                                      const SequenceDetails& details) const {
  const auto tokens = static_cast<std::size_t>(info.tokens);
  const auto fits = [&](std::size_t size) { return size == 0 || size == tokens; };
  HAE_EXPECTS(fits(details.frame.size()) && fits(details.patch.size()) && fits(details.token_id.size()));
  HAE_EXPECTS(fits(details.token.size()) && details.position_axes >= 1);
  const auto axes = static_cast<std::size_t>(details.position_axes);
  HAE_EXPECTS(details.position.empty() || details.position.size() == tokens * axes);
  if (!details.frame.empty()) {
    output_.write_integers(group, "frame", details.frame);
  }
  if (!details.patch.empty()) {
    std::vector<Index> flat;
    for (const std::array<Index, 2>& patch : details.patch) {
      flat.insert(flat.end(), patch.begin(), patch.end());
    }
    output_.write_integers(group, "patch", flat, std::array<hsize_t, 2>{tokens, 2});
  }
  if (!details.position.empty()) {
    const std::array<hsize_t, 2> shape{tokens, axes};
    output_.write_integers(group, "position", details.position, std::span(shape).first(axes == 1 ? 1 : 2));
  }
  if (!details.token_id.empty()) {
    output_.write_integers(group, "token_id", details.token_id);
  }
  if (!details.token.empty()) {
    output_.write_strings(group, "token", details.token);
  }
}

void TraceWriter::File::create_layers(hid_t group) {
  const Handle layers = output_.create_group(group, "layers");
  const Handle type = hdf5::payload_type(type_);
  arrays_.clear();
  for (Index layer = 0; layer < info_.layers; ++layer) {
    const Handle parent = output_.create_group(layers.get(), six_digits(layer));
    for (const LayerArray array : kArrays) {
      Array& open = arrays_.emplace_back();
      if (const std::optional<std::vector<hsize_t>> shape = shape_of(array, info_)) {
        open.shape = *shape;
        open.dataset = output_.create_dataset(parent.get(), name_of(array), type.get(), open.shape);
        open.written.resize(static_cast<std::size_t>(open.shape[0]));
      }
    }
  }
}

void TraceWriter::File::begin_sequence(const SequenceInfo& info, const SequenceDetails& details,
                                       FloatType type) {
  HAE_EXPECTS(!output_.finished() && count_ < kMostNumbered);
  HAE_EXPECTS(info.head_dim || (info.payload == Payload::attention && !info.has_values));
  HAE_EXPECTS(info.payload == Payload::attention || info.has_values);
  check_info(info, output_.name() + ":/sequences/" + six_digits(count_));
  HAE_EXPECTS(std::find(names_.begin(), names_.end(), info.name) == names_.end());
  end_sequence();
  const Guard guard;
  info_ = info;
  type_ = type;
  names_.push_back(info.name);
  const Handle group = output_.create_group(sequences_.get(), six_digits(count_++));
  write_attributes(group.get(), info, details);
  write_tokens(group.get(), info);
  write_details(group.get(), info, details);
  create_layers(group.get());
}

void TraceWriter::File::write_head(Index layer, LayerArray array, Index head, std::span<const float> values) {
  HAE_EXPECTS(!output_.finished() && layer >= 0 && layer < info_.layers);
  Array& open = arrays_[place(layer, array)];
  HAE_EXPECTS(!open.shape.empty() && head >= 0 && head < static_cast<Index>(open.shape[0]));
  std::vector<hsize_t> extent = open.shape;
  extent[0] = 1;
  hsize_t size = 1;
  for (const hsize_t along : extent) {
    size *= along;
  }
  HAE_EXPECTS(size == values.size() && !open.written[static_cast<std::size_t>(head)]);
  open.written[static_cast<std::size_t>(head)] = true;
  if (values.empty()) {
    return;
  }
  codes_.resize(values.size() * static_cast<std::size_t>(bytes_of(type_)));
  encode(type_, values, codes_);
  const Guard guard;
  std::vector<hsize_t> start(open.shape.size(), 0);
  start[0] = static_cast<hsize_t>(head);
  const Handle file_space(H5Dget_space(open.dataset.get()));
  const Handle memory_space(H5Screate_simple(1, &size, nullptr));
  H5Sselect_hyperslab(file_space.get(), H5S_SELECT_SET, start.data(), nullptr, extent.data(), nullptr);
  // Raw codes in the file's own type: the library, which rounds some halves wrongly, converts nothing.
  const Handle type(H5Dget_type(open.dataset.get()));
  output_.check(H5Dwrite(open.dataset.get(), type.get(), memory_space.get(), file_space.get(), H5P_DEFAULT,
                         codes_.data()),
                message("layer ", layer, ", ", name_of(array)));
}

void TraceWriter::File::end_sequence() {
  for (const Array& open : arrays_) {
    HAE_EXPECTS(std::find(open.written.begin(), open.written.end(), false) == open.written.end());
  }
  const Guard guard;
  arrays_.clear();
}

void TraceWriter::File::finish() {
  HAE_EXPECTS(!output_.finished() && count_ > 0);
  end_sequence();
  const Guard guard;
  sequences_ = Handle();
  output_.finish();
}

TraceWriter::TraceWriter(const std::filesystem::path& path, const TraceOrigin& origin)
    : file_(std::make_unique<File>(path, origin)) {}

TraceWriter::~TraceWriter() = default;

void TraceWriter::begin_sequence(const SequenceInfo& info, const SequenceDetails& details, FloatType type) {
  file_->begin_sequence(info, details, type);
}

void TraceWriter::write_head(Index layer, LayerArray array, Index head, std::span<const float> values) {
  file_->write_head(layer, array, head, values);
}

void TraceWriter::finish() {
  file_->finish();
}

}  // namespace hae::traces
