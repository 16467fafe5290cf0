#include "traces/npz.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "sim/trace.hpp"
#include "traces/import_steps.hpp"
#include "traces/isolated.hpp"
#include "traces/message.hpp"
#include "traces/npz_archive.hpp"
#include "traces/trace_writer.hpp"

namespace hae::traces {
namespace {

std::vector<std::byte> read_whole(NpyReader& reader, Index largest_bytes) {
  const Index bytes = reader.header().elements() * reader.header().item_bytes;
  if (bytes > largest_bytes) {
    refuse(reader.where(), ": has ", bytes, " bytes and must be held whole, expected at most ", largest_bytes,
           "; save it in C order (numpy.ascontiguousarray)");
  }
  std::vector<std::byte> all(static_cast<std::size_t>(bytes));
  reader.read(all);
  reader.finish();
  return all;
}

/// For each element in C order, the place of its item in stored order.
class StoredOrder {
 public:
  explicit StoredOrder(const NpyHeader& header) : header_(header) {}

  [[nodiscard]] Index place(Index element) const {
    if (!header_.fortran) {
      return element;
    }
    Index place = 0;
    Index stride = header_.elements();
    for (std::size_t axis = header_.shape.size(); axis-- > 0;) {
      const Index extent = header_.shape[axis];
      stride /= extent;
      place += element % extent * stride;
      element /= extent;
    }
    return place;
  }

 private:
  const NpyHeader& header_;
};

std::uint64_t load_unsigned(const std::byte* item, Index bytes, bool swapped) {
  std::uint64_t value = 0;
  for (Index i = 0; i < bytes; ++i) {
    const bool most_significant_first = swapped == (std::endian::native == std::endian::little);
    const Index at = most_significant_first ? i : bytes - 1 - i;
    value = value << 8 | static_cast<std::uint64_t>(item[at]);
  }
  return value;
}

FloatType float_type(const NpyReader& reader) {
  const NpyHeader& header = reader.header();
  if (header.kind == 'f' && header.item_bytes == 4) {
    return FloatType::float32;
  }
  if (header.kind == 'f' && header.item_bytes == 2) {
    return FloatType::float16;
  }
  refuse(reader.where(), ": found ", header.type_name(),
         ", expected float16 or float32; save it with .astype('float32')");
}

/// A float array, delivered in C order piece by piece.
class FloatArray {
 public:
  FloatArray(NpyReader reader, Index largest_bytes) : reader_(std::move(reader)), type_(float_type(reader_)) {
    if (reader_.header().fortran) {
      whole_ = read_whole(reader_, largest_bytes);
    }
  }

  [[nodiscard]] FloatType type() const { return type_; }
  [[nodiscard]] const std::string& where() const { return reader_.where(); }
  [[nodiscard]] const std::vector<Index>& shape() const { return reader_.header().shape; }

  void next(std::span<float> out) {
    const auto item = static_cast<std::size_t>(reader_.header().item_bytes);
    codes_.resize(out.size() * item);
    if (!reader_.header().fortran) {
      reader_.read(codes_);
    } else {
      const StoredOrder order(reader_.header());
      for (std::size_t i = 0; i < out.size(); ++i) {
        const auto place = static_cast<std::size_t>(order.place(delivered_ + static_cast<Index>(i)));
        std::memcpy(codes_.data() + i * item, whole_.data() + place * item, item);
      }
    }
    delivered_ += static_cast<Index>(out.size());
    decode(type_, reader_.header().swapped, codes_, out);
    if (delivered_ == reader_.header().elements() && !reader_.header().fortran) {
      reader_.finish();
    }
  }

 private:
  NpyReader reader_;
  FloatType type_;
  std::vector<std::byte> whole_;
  std::vector<std::byte> codes_;
  Index delivered_ = 0;
};

class Importer {
 public:
  Importer(const std::filesystem::path& from, const std::filesystem::path& to, const NpzOptions& options)
      : archive_(from), to_(to), options_(options) {
    info_.name = options.name.empty() ? from.stem().string() : options.name;
    info_.group = options.group.empty() ? info_.name : options.group;
  }

  void run() {
    const bool attention = archive_.has("attention");
    info_.payload = attention ? Payload::attention : Payload::qkv;
    refuse_strangers();
    if (attention) {
      read_attention_shape();
    } else {
      read_qkv_shape();
    }
    check_limits(info_,
                 archive_.name());  // Lists per token and per layer are made by these, so they come first.
    read_prompt();
    read_images();
    read_masks();
    read_tokens();
    info_.scale = archive_.has("scale") ? real("scale") : default_scale(info_);
    info_.generated = info_.steps() + 1;
    check_info(info_, archive_.name());
    TraceWriter writer(to_, options_.origin);
    writer.begin_sequence(info_, details_, type_);
    if (attention) {
      copy_attention(writer);
    } else {
      copy_heads(writer, "q", LayerArray::queries, info_.query_heads);
      copy_heads(writer, "k", LayerArray::keys, info_.kv_heads);
    }
    if (info_.has_values) {
      copy_heads(writer, "v", LayerArray::values, info_.kv_heads);
    }
    writer.finish();
  }

 private:
  /// A misspelt optional array would be left out in silence; so an array nobody reads is an error.
  void refuse_strangers() const {
    std::vector<std::string> known{"prompt", "modality", "image", "scale", "tokens", "v"};
    if (info_.payload == Payload::qkv) {
      known.insert(known.end(), {"q", "k", "window"});
    } else {
      known.emplace_back("attention");
      if (!archive_.has("v")) {
        known.insert(known.end(), {"kv_heads", "head_dim"});
      }
    }
    for (const std::string& array : archive_.arrays()) {
      if (std::find(known.begin(), known.end(), array) == known.end()) {
        refuse(archive_.name(), ": holds ", in_quotes(array), ", which an archive with ",
               info_.payload == Payload::qkv ? "q, k, v"
               : archive_.has("v")           ? "attention and v"
                                             : "attention",
               " must not; see traces/README.md for the arrays there are");
      }
    }
  }

  [[nodiscard]] FloatArray floats(const std::string& array, std::size_t rank, const char* axes) const {
    FloatArray values(archive_.open(array), options_.largest_array_bytes);
    if (values.shape().size() != rank) {
      refuse(values.where(), ": found shape ", values.shape(), ", expected [", axes,
             "]; save it with that shape");
    }
    return values;
  }

  void expect_shape(const FloatArray& array, std::span<const Index> expected, const char* axes) const {
    if (!std::equal(expected.begin(), expected.end(), array.shape().begin(), array.shape().end())) {
      refuse(array.where(), ": found shape ", array.shape(), ", expected [", axes, "] = ", expected,
             "; save it with that shape");
    }
    if (array.type() != type_) {
      refuse(array.where(), ": found ", name_of(array.type()), ", expected ", name_of(type_),
             " like the other arrays; save all of them with one type");
    }
  }

  void read_qkv_shape() {
    const FloatArray q = floats("q", 4, "layers, query_heads, tokens, head_dim");
    const FloatArray k = floats("k", 4, "layers, kv_heads, tokens, head_dim");
    type_ = q.type();
    info_.layers = q.shape()[0];
    info_.query_heads = q.shape()[1];
    info_.tokens = q.shape()[2];
    info_.head_dim = q.shape()[3];
    info_.kv_heads = k.shape()[1];
    expect_shape(k, std::array{info_.layers, info_.kv_heads, info_.tokens, *info_.head_dim},
                 "layers, kv_heads, tokens, head_dim");
    read_values_shape();
  }

  void read_attention_shape() {
    const FloatArray attention = floats("attention", 4, "layers, query_heads, tokens, tokens");
    type_ = attention.type();
    info_.layers = attention.shape()[0];
    info_.query_heads = attention.shape()[1];
    info_.tokens = attention.shape()[2];
    expect_shape(attention, std::array{info_.layers, info_.query_heads, info_.tokens, info_.tokens},
                 "layers, query_heads, tokens, tokens");
    info_.row_sum_tolerance = row_sum_tolerance(type_);
    if (archive_.has("v")) {
      const FloatArray v = floats("v", 4, "layers, kv_heads, tokens, head_dim");
      info_.kv_heads = v.shape()[1];
      info_.head_dim = v.shape()[3];
      read_values_shape();
      return;
    }
    info_.kv_heads = archive_.has("kv_heads") ? integer("kv_heads") : info_.query_heads;
    if (archive_.has("head_dim")) {
      info_.head_dim = integer("head_dim");
      info_.element_bytes = bytes_of(type_);
    }
  }

  void read_values_shape() {
    expect_shape(floats("v", 4, "layers, kv_heads, tokens, head_dim"),
                 std::array{info_.layers, info_.kv_heads, info_.tokens, *info_.head_dim},
                 "layers, kv_heads, tokens, head_dim");
    info_.has_values = true;
    info_.element_bytes = bytes_of(type_);
  }

  /// The most bytes of a list of integers or tokens.
  [[nodiscard]] Index list_bytes() const { return std::min(options_.largest_array_bytes, kMetadataBytes); }

  [[nodiscard]] std::vector<Index> integers(const std::string& array) const {
    NpyReader reader = archive_.open(array);
    const NpyHeader header = reader.header();
    if ((header.kind != 'i' && header.kind != 'u') || header.item_bytes < 1 || header.item_bytes > 8) {
      refuse(reader.where(), ": found ", header.type_name(),
             ", expected integers; save it with .astype('int64')");
    }
    const std::vector<std::byte> items = read_whole(reader, list_bytes());
    std::vector<Index> values;
    for (std::size_t at = 0; at < items.size(); at += static_cast<std::size_t>(header.item_bytes)) {
      const std::uint64_t bits = load_unsigned(items.data() + at, header.item_bytes, header.swapped);
      const auto unused = static_cast<unsigned>(64 - 8 * header.item_bytes);
      // Shifting up and down again spreads the sign of a short integer over all 64 bits.
      const auto value =
          header.kind == 'u' ? static_cast<Index>(bits) : static_cast<Index>(bits << unused) >> unused;
      if (header.kind == 'u' && value < 0) {
        refuse(reader.where(), "[", values.size(), "]: found ", bits,
               ", expected at most 2^63 - 1; save it again");
      }
      values.push_back(value);
    }
    return values;
  }

  [[nodiscard]] std::vector<Index> integers(const std::string& array, Index expected,
                                            const char* axis) const {
    const std::vector<Index> shape = archive_.open(array).header().shape;
    if (shape != std::vector{expected}) {
      refuse(archive_.name(), ":/", array, ": found shape ", shape, ", expected [", axis, "] = [", expected,
             "]; save it with that shape");
    }
    return integers(array);
  }

  void expect_one(const std::string& array) const {
    if (archive_.open(array).header().elements() != 1) {
      refuse(archive_.name(), ":/", array, ": found shape ", archive_.open(array).header().shape,
             ", expected one number; save a scalar");
    }
  }

  [[nodiscard]] Index integer(const std::string& array) const {
    expect_one(array);
    return integers(array)[0];
  }

  [[nodiscard]] double real(const std::string& array) const {
    expect_one(array);
    NpyReader reader = archive_.open(array);
    const NpyHeader header = reader.header();
    if (header.kind == 'i' || header.kind == 'u') {
      return static_cast<double>(integer(array));
    }
    if (header.kind == 'f' && header.item_bytes == 8) {
      const std::vector<std::byte> item = read_whole(reader, 8);
      return std::bit_cast<double>(load_unsigned(item.data(), 8, header.swapped));
    }
    float value = 0;
    FloatArray(std::move(reader), 8).next({&value, 1});
    return static_cast<double>(value);
  }

  void read_prompt() {
    info_.prompt = integer("prompt");
    if (info_.prompt < 1 || info_.prompt > info_.tokens) {
      refuse(archive_.name(), ":/prompt: found ", info_.prompt, ", expected 1 .. ", info_.tokens,
             " (the tokens of the arrays); save the number of prompt tokens");
    }
    info_.prompt_rows = every_prompt_row(info_.prompt);
  }

  void read_images() {
    const auto tokens = static_cast<std::size_t>(info_.tokens);
    std::optional<std::vector<Index>> modality;
    if (archive_.has("modality")) {
      modality = integers("modality", info_.tokens, "tokens");
      check_modality(*modality);
    }
    if (!archive_.has("image")) {
      info_.image = one_image_a_span(modality.value_or(std::vector<Index>(tokens, 0)));
      return;
    }
    info_.image = integers("image", info_.tokens, "tokens");
    for (std::size_t token = 0; token < tokens; ++token) {
      const Index image = info_.image[token];
      if (image < -1 || (modality && (image >= 0) != ((*modality)[token] == 1))) {
        refuse(archive_.name(), ":/image[", token, "]: found ", image,
               ", expected -1 for text and a number >= 0 ",
               "where modality is 1; save both for the same tokens");
      }
    }
  }

  void check_modality(const std::vector<Index>& modality) const {
    for (std::size_t token = 0; token < modality.size(); ++token) {
      if (modality[token] != 0 && modality[token] != 1) {
        refuse(archive_.name(), ":/modality[", token, "]: found ", modality[token],
               ", expected 0 (text) or 1 (image); save it again");
      }
    }
  }

  static std::vector<Index> one_image_a_span(const std::vector<Index>& modality) {
    std::vector<Index> image;
    Index next = 0;
    for (std::size_t token = 0; token < modality.size(); ++token) {
      const bool begins = modality[token] == 1 && (token == 0 || modality[token - 1] == 0);
      next += begins ? 1 : 0;
      image.push_back(modality[token] == 1 ? next - 1 : -1);
    }
    return image;
  }

  void read_masks() {
    info_.masks.resize(static_cast<std::size_t>(info_.layers));
    if (archive_.has("window")) {
      const std::vector<Index> windows = integers("window", info_.layers, "layers");
      for (std::size_t layer = 0; layer < windows.size(); ++layer) {
        info_.masks[layer].window = windows[layer];
      }
    }
  }

  void read_tokens() {
    if (!archive_.has("tokens")) {
      return;
    }
    NpyReader reader = archive_.open("tokens");
    const NpyHeader header = reader.header();
    if (header.kind != 'U' && header.kind != 'S') {
      refuse(reader.where(), ": found ", header.type_name(), ", expected strings; save it with .astype(str)");
    }
    if (header.shape != std::vector{info_.tokens}) {
      refuse(reader.where(), ": found shape ", header.shape, ", expected [tokens] = [", info_.tokens,
             "]; save one string a token");
    }
    const std::vector<std::byte> items = read_whole(reader, list_bytes());
    for (Index token = 0; token < info_.tokens; ++token) {
      const std::byte* item = items.data() + token * header.item_bytes;
      details_.token.push_back(header.kind == 'U' ? from_ucs4(item, header) : from_bytes(item, header));
    }
  }

  static std::string from_bytes(const std::byte* item, const NpyHeader& header) {
    std::string text(reinterpret_cast<const char*>(item), static_cast<std::size_t>(header.item_bytes));
    text.resize(text.find_last_not_of('\0') + 1);
    return text;
  }

  /// numpy keeps text as one 32-bit code point a character, padded with zeros.
  static std::string from_ucs4(const std::byte* item, const NpyHeader& header) {
    std::string text;
    for (Index at = 0; at < header.item_bytes; at += 4) {
      const auto point = static_cast<std::uint32_t>(load_unsigned(item + at, 4, header.swapped));
      append_utf8(text, point < 0x110000 ? point : 0xFFFD);
    }
    text.resize(text.find_last_not_of('\0') + 1);
    return text;
  }

  static void append_utf8(std::string& text, std::uint32_t point) {
    const auto add = [&](std::uint32_t byte) { text += static_cast<char>(byte); };
    if (point < 0x80) {
      add(point);
    } else if (point < 0x800) {
      add(0xC0 | point >> 6);
      add(0x80 | (point & 0x3F));
    } else if (point < 0x10000) {
      add(0xE0 | point >> 12);
      add(0x80 | (point >> 6 & 0x3F));
      add(0x80 | (point & 0x3F));
    } else {
      add(0xF0 | point >> 18);
      add(0x80 | (point >> 12 & 0x3F));
      add(0x80 | (point >> 6 & 0x3F));
      add(0x80 | (point & 0x3F));
    }
  }

  void copy_heads(TraceWriter& writer, const char* name, LayerArray array, Index heads) {
    FloatArray source = floats(name, 4, "");
    std::vector<float> head_values(static_cast<std::size_t>(info_.tokens * *info_.head_dim));
    for (Index layer = 0; layer < info_.layers; ++layer) {
      for (Index head = 0; head < heads; ++head) {
        source.next(head_values);
        write_finite_head(writer, info_, layer, array, head, head_values,
                          message(source.where(), "[", layer, ", ", head, ", "));
      }
    }
  }

  void copy_attention(TraceWriter& writer) {
    FloatArray source = floats("attention", 4, "");
    std::vector<float> row(static_cast<std::size_t>(info_.tokens));
    const auto next_row = [&]() -> std::span<const float> {
      source.next(row);
      return row;
    };
    for (Index layer = 0; layer < info_.layers; ++layer) {
      for (Index head = 0; head < info_.query_heads; ++head) {
        write_attention_head(
            writer, info_, layer, head,
            {next_row, message(source.where(), "[", layer, ", ", head, ", "), "record it again"});
      }
    }
  }

  NpzArchive archive_;
  std::filesystem::path to_;
  NpzOptions options_;
  SequenceInfo info_;
  SequenceDetails details_;
  FloatType type_ = FloatType::float32;
};

}  // namespace

void import_npz(const std::filesystem::path& from, const std::filesystem::path& to,
                const NpzOptions& options) {
  Importer(from, to, options).run();
}

}  // namespace hae::traces
