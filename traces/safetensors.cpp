#include "traces/safetensors.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "sim/errors.hpp"
#include "traces/message.hpp"

namespace hae::traces {
namespace {

/// Hears the header while it is parsed, so that no document is built and nesting costs nothing: anything
/// deeper than `{"name": {"field": [number]}}` ends it.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(const std::string& where) : where_(where) {}

  std::map<std::string, SafetensorsTensor> take() { return std::move(tensors_); }

  bool start_object(std::size_t) override {
    expect(depth_ == 0 || depth_ == 1);
    ++depth_;
    fields_.clear();
    type_.reset();
    shape_.reset();
    offsets_.reset();
    return true;
  }

  bool key(std::string& key) override {
    if (!(depth_ == 1 ? names_ : fields_).insert(key).second) {
      refuse(where_, ": its header names ", in_quotes(key), " twice; save it again");
    }
    (depth_ == 1 ? name_ : field_) = std::move(key);
    return true;
  }

  bool string(std::string& value) override {
    expect(depth_ == 2);
    if (!in_metadata()) {
      expect(field_ == "dtype");
      type_ = float_type(value);
    }
    return true;
  }

  bool start_array(std::size_t) override {
    expect(depth_ == 2 && !in_metadata() && (field_ == "shape" || field_ == "data_offsets"));
    ++depth_;
    numbers_.clear();
    return true;
  }

  bool number_unsigned(std::uint64_t value) override {
    expect(depth_ == 3 && value <= INT64_MAX);
    numbers_.push_back(static_cast<Index>(value));
    return true;
  }

  bool end_array() override {
    --depth_;
    (field_ == "shape" ? shape_ : offsets_) = numbers_;
    return true;
  }

  bool end_object() override {
    if (depth_ == 2 && !in_metadata()) {
      expect(type_ && shape_ && offsets_ && fields_.size() == 3 && offsets_->size() == 2);
      tensors_[name_] = {*type_, *shape_, {(*offsets_)[0], (*offsets_)[1]}};
    }
    --depth_;
    return true;
  }

  bool null() override { fail(); }
  bool boolean(bool) override { fail(); }
  bool number_integer(std::int64_t) override { fail(); }
  bool number_float(double, const std::string&) override { fail(); }
  bool binary(nlohmann::json::binary_t&) override { fail(); }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) override {
    refuse(where_, ": its header is no JSON (byte ", position,
           " of it); it is damaged: copy or save it again");
  }

 private:
  [[nodiscard]] bool in_metadata() const { return name_ == "__metadata__"; }

  void expect(bool holds) const {
    if (!holds) {
      fail();
    }
  }

  [[noreturn]] void fail() const {
    refuse(where_, name_.empty() ? "" : ":/", name_.empty() ? "" : in_quotes(name_),
           ": its header is damaged, expected dtype, shape and data_offsets of each tensor; save it again");
  }

  [[nodiscard]] FloatType float_type(const std::string& dtype) const {
    if (dtype == "F32") {
      return FloatType::float32;
    }
    if (dtype == "F16") {
      return FloatType::float16;
    }
    if (dtype == "BF16") {
      return FloatType::bfloat16;
    }
    refuse(where_, ":/", in_quotes(name_), ": found dtype ", in_quotes(dtype),
           ", expected F32, F16 or BF16; save it with one of them");
  }

  const std::string& where_;
  int depth_ = 0;
  std::string name_;
  std::string field_;
  std::set<std::string> names_;   ///< all so far
  std::set<std::string> fields_;  ///< of the tensor so far
  std::vector<Index> numbers_;
  std::optional<FloatType> type_;
  std::optional<std::vector<Index>> shape_;
  std::optional<std::vector<Index>> offsets_;
  std::map<std::string, SafetensorsTensor> tensors_;
};

std::optional<Index> declared_bytes(const SafetensorsTensor& tensor) {
  Index bytes = bytes_of(tensor.type);
  for (const Index extent : tensor.shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) {
      return std::nullopt;
    }
  }
  return bytes;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : name_(path.string()) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    refuse(name_, std::filesystem::exists(path, error) ? ": is not a regular file" : ": missing",
           ", expected a .safetensors file; copy the whole recording");
  }
  const auto bytes = static_cast<Index>(std::filesystem::file_size(path, error));
  file_.open(path, std::ios::binary);
  std::array<unsigned char, 8> length{};
  if (!file_.read(reinterpret_cast<char*>(length.data()), length.size())) {
    refuse(name_, ": cannot be read as a .safetensors file; check it and its permissions");
  }
  std::uint64_t header_bytes = 0;
  for (std::size_t i = length.size(); i-- > 0;) {
    header_bytes = header_bytes << 8 | length[i];
  }
  const Index most = std::min(kLongestSafetensorsHeader, bytes - static_cast<Index>(length.size()));
  if (header_bytes > static_cast<std::uint64_t>(most)) {
    refuse(name_, ": declares a header of ", header_bytes, " bytes, expected at most ", most,
           "; it is no .safetensors file or is truncated: copy or save it again");
  }
  std::string header(header_bytes, '\0');
  file_.read(header.data(), static_cast<std::streamsize>(header.size()));
  // The parser takes a zero byte for the end, and skips a byte order mark.
  if (!header.starts_with('{') || header.find('\0') != std::string::npos) {
    refuse(name_, ": its header is no JSON object; it is no .safetensors file or is damaged: save it again");
  }
  HeaderReader reader(name_);
  nlohmann::json::sax_parse(header, &reader);
  tensors_ = reader.take();
  data_ = {static_cast<Index>(length.size() + header.size()), bytes};
  check_layout();
}

void SafetensorsFile::check_layout() const {
  std::vector<std::pair<Range, std::string>> parts;
  for (const auto& [name, tensor] : tensors_) {
    const std::optional<Index> declared = declared_bytes(tensor);
    if (!declared || tensor.bytes.begin > tensor.bytes.end || tensor.bytes.size() != *declared) {
      refuse(name_, ":/", in_quotes(name), ": its shape ", tensor.shape, " of ", name_of(tensor.type),
             " does not fit its bytes [", tensor.bytes.begin, ", ", tensor.bytes.end,
             "); it is damaged: copy or save it again");
    }
    parts.emplace_back(tensor.bytes, name);
  }
  std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first.begin, a.first.end) < std::pair(b.first.begin, b.first.end);
  });
  Index covered = 0;
  for (const auto& [part, name] : parts) {
    if (part.begin != covered) {
      refuse(name_, ":/", in_quotes(name), ": its bytes begin at ", part.begin, ", expected ", covered,
             ", where the tensor before it ends; it is damaged: copy or save it again");
    }
    covered = part.end;
  }
  if (covered != data_.size()) {
    refuse(name_, ": holds ", data_.size(), " bytes of tensors, expected ", covered,
           " as its header says; it is truncated or damaged: copy or save it again");
  }
}

void SafetensorsFile::read(const SafetensorsTensor& tensor, Index first, std::span<float> out) {
  const Index bytes = bytes_of(tensor.type);
  const auto count = static_cast<Index>(out.size());
  HAE_EXPECTS(first >= 0 && count <= tensor.bytes.size() / bytes - first);
  // The codes go to the tail of `out`, where decoding reads them before it overwrites them.
  const std::span<std::byte> codes =
      std::as_writable_bytes(out).last(static_cast<std::size_t>(count * bytes));
  file_.seekg(data_.begin + tensor.bytes.begin + first * bytes);
  if (!file_.read(reinterpret_cast<char*>(codes.data()), static_cast<std::streamsize>(codes.size()))) {
    refuse(name_, ": ends early; it changed while it was read: import it again");
  }
  decode(tensor.type, std::endian::native == std::endian::big, codes, out);
}

}  // namespace hae::traces
