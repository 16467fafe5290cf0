#include "traces/npz_archive.hpp"

#include <zip.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <utility>

#include "traces/message.hpp"

namespace hae::traces {
namespace {

constexpr std::size_t kLongestHeader = 1 << 16;

/// Reads the Python literal of a `.npy` header: a dictionary with the keys descr, fortran_order and shape.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, const std::string& where) : rest_(text), where_(where) {}

  NpyHeader parse() {
    NpyHeader header;
    bool has_type = false;
    bool has_order = false;
    bool has_shape = false;
    expect('{');
    while (!take('}')) {
      const std::string key = string();
      expect(':');
      if (key == "descr" && !std::exchange(has_type, true)) {
        type(header);
      } else if (key == "fortran_order" && !std::exchange(has_order, true)) {
        header.fortran = boolean();
      } else if (key == "shape" && !std::exchange(has_shape, true)) {
        header.shape = tuple();
      } else {
        fail();
      }
      take(',');
    }
    if (!has_type || !has_order || !has_shape) {
      fail();
    }
    return header;
  }

 private:
  [[noreturn]] void fail() const {
    refuse(where_, ": its .npy header is damaged, expected descr, fortran_order and shape; save it again");
  }

  void skip_space() {
    while (!rest_.empty() && (rest_.front() == ' ' || rest_.front() == '\n')) {
      rest_.remove_prefix(1);
    }
  }

  bool take(char letter) {
    skip_space();
    if (rest_.empty() || rest_.front() != letter) {
      return false;
    }
    rest_.remove_prefix(1);
    return true;
  }

  void expect(char letter) {
    if (!take(letter)) {
      fail();
    }
  }

  bool take_word(std::string_view word) {
    skip_space();
    if (!rest_.starts_with(word)) {
      return false;
    }
    rest_.remove_prefix(word.size());
    return true;
  }

  std::string string() {
    const char quote = take('\'') ? '\'' : '"';
    if (quote == '"') {
      expect('"');
    }
    const std::size_t end = rest_.find(quote);
    if (end == std::string_view::npos) {
      fail();
    }
    std::string value(rest_.substr(0, end));
    rest_.remove_prefix(end + 1);
    return value;
  }

  bool boolean() {
    if (take_word("True")) {
      return true;
    }
    if (!take_word("False")) {
      fail();
    }
    return false;
  }

  Index integer() {
    skip_space();
    Index value = 0;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    if (error != std::errc() || value < 0) {
      fail();
    }
    rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
    return value;
  }

  std::vector<Index> tuple() {
    std::vector<Index> values;
    expect('(');
    while (!take(')')) {
      values.push_back(integer());
      if (!take(',')) {
        expect(')');
        break;
      }
    }
    return values;
  }

  /// `<f4`, `|S5`, `>i8`. A list here is a record type; `|O` holds Python objects, which only pickle can
  /// read.
  void type(NpyHeader& header) {
    if (take('[')) {
      refuse(where_,
             ": holds records (a structured dtype), expected plain numbers; save each field as an array");
    }
    const std::string descr = string();
    if (descr.find('O') != std::string::npos) {
      refuse(where_,
             ": holds Python objects (pickle), which are never loaded; save it as a plain numeric array");
    }
    const auto [end, error] = std::from_chars(descr.data() + std::min<std::size_t>(2, descr.size()),
                                              descr.data() + descr.size(), header.item_bytes);
    if (descr.size() < 3 || std::string_view("<>|=").find(descr[0]) == std::string_view::npos ||
        error != std::errc() || end != descr.data() + descr.size() || header.item_bytes < 0) {
      refuse(where_, ": has the dtype ", in_quotes(descr),
             ", expected a plain number or string; save it again");
    }
    header.kind = descr[1];
    if (header.kind == 'U' && __builtin_mul_overflow(header.item_bytes, Index{4}, &header.item_bytes)) {
      fail();
    }
    constexpr bool kLittle = std::endian::native == std::endian::little;
    header.swapped = descr[0] == (kLittle ? '>' : '<');
  }

  std::string_view rest_;
  const std::string& where_;
};

std::string zip_reason(int code) {
  zip_error_t error;
  zip_error_init_with_code(&error, code);
  std::string reason = zip_error_strerror(&error);
  zip_error_fini(&error);
  return reason;
}

zip_stat_t stat_entry(zip* archive, Index entry, const std::string& where) {
  zip_stat_t status;
  zip_stat_init(&status);
  constexpr zip_uint64_t kNeeded = ZIP_STAT_NAME | ZIP_STAT_SIZE | ZIP_STAT_COMP_SIZE | ZIP_STAT_COMP_METHOD;
  if (zip_stat_index(archive, static_cast<zip_uint64_t>(entry), 0, &status) != 0 ||
      (status.valid & kNeeded) != kNeeded) {
    refuse(where, ": entry ", entry, " is damaged (", zip_strerror(archive),
           "); save or copy the file again");
  }
  return status;
}

/// Refuses an entry that is not stored or deflated, or that promises more than its bytes can hold.
void check_entry(const zip_stat_t& status, const std::string& where, Index file_bytes) {
  if (status.comp_method != ZIP_CM_STORE && status.comp_method != ZIP_CM_DEFLATE) {
    refuse(where, ": compressed by zip method ", status.comp_method,
           ", expected stored or deflated; save it again");
  }
  if ((status.valid & ZIP_STAT_ENCRYPTION_METHOD) != 0 && status.encryption_method != ZIP_EM_NONE) {
    refuse(where, ": encrypted, expected a plain archive; save it again");
  }
  // Deflate never shrinks a byte stream more than 1032 times.
  const zip_uint64_t most = status.comp_method == ZIP_CM_STORE ? status.comp_size : status.comp_size * 1040;
  if (status.comp_size > static_cast<zip_uint64_t>(file_bytes) || status.size > most) {
    refuse(where, ": declares ", status.size, " bytes but stores ", status.comp_size, " in a file of ",
           file_bytes, "; it is damaged: save or copy it again");
  }
}

}  // namespace

Index NpyHeader::elements() const {
  Index total = 1;
  for (const Index extent : shape) {
    if (__builtin_mul_overflow(total, extent, &total)) {
      return -1;
    }
  }
  return total;
}

std::string NpyHeader::type_name() const {
  const Index bits = 8 * item_bytes;
  switch (kind) {
    case 'f':
      return message("float", bits);
    case 'i':
      return message("int", bits);
    case 'u':
      return message("uint", bits);
    case 'b':
      return "bool";
    case 'U':
    case 'S':
      return "strings";
    default:
      return message("dtype kind ", in_quotes(std::string_view(&kind, 1)), " of ", item_bytes, " bytes");
  }
}

void NpyReader::Close::operator()(zip_file* file) const {
  zip_fclose(file);
}

NpyReader::NpyReader(zip* archive, Index entry, std::string where, Index file_bytes)
    : where_(std::move(where)) {
  const zip_stat_t status = stat_entry(archive, entry, where_);
  check_entry(status, where_, file_bytes);
  file_.reset(zip_fopen_index(archive, static_cast<zip_uint64_t>(entry), 0));
  if (!file_) {
    refuse(where_, ": cannot be opened (", zip_strerror(archive), "); save or copy the file again");
  }
  constexpr std::string_view kMagic = "\x93NUMPY";
  std::array<unsigned char, 8> start{};
  read(std::as_writable_bytes(std::span(start)));
  if (std::memcmp(start.data(), kMagic.data(), kMagic.size()) != 0 || start[6] < 1 || start[6] > 3) {
    refuse(where_, ": not a .npy array of version 1 to 3; save it with numpy");
  }
  std::array<unsigned char, 4> length{};
  const std::size_t length_bytes = start[6] == 1 ? 2 : 4;
  read(std::as_writable_bytes(std::span(length).first(length_bytes)));
  const std::size_t header_bytes = length[0] + (std::size_t{length[1]} << 8) +
                                   (std::size_t{length[2]} << 16) + (std::size_t{length[3]} << 24);
  if (header_bytes > kLongestHeader) {
    refuse(where_, ": its .npy header has ", header_bytes, " bytes, expected at most ", kLongestHeader,
           "; save it again");
  }
  std::string header(header_bytes, ' ');
  read(std::as_writable_bytes(std::span(header.data(), header.size())));
  header_ = HeaderParser(header, where_).parse();
  const Index elements = header_.elements();
  Index data_bytes = 0;
  if (elements < 0 || __builtin_mul_overflow(elements, header_.item_bytes, &data_bytes) ||
      static_cast<zip_uint64_t>(data_bytes) + start.size() + length_bytes + header_bytes != status.size) {
    refuse(where_, ": its shape ", header_.shape, " of ", header_.type_name(), " does not fit its ",
           status.size, " bytes; it is damaged: save or copy it again");
  }
}

void NpyReader::read(std::span<std::byte> out) {
  while (!out.empty()) {
    const zip_int64_t got = zip_fread(file_.get(), out.data(), out.size());
    if (got <= 0) {
      refuse(where_, ": ends early or is damaged (", zip_file_strerror(file_.get()),
             "); save or copy the file again");
    }
    out = out.subspan(static_cast<std::size_t>(got));
  }
}

void NpyReader::finish() {
  std::byte more{};
  if (zip_fread(file_.get(), &more, 1) != 0) {
    refuse(where_, ": its checksum is wrong (", zip_file_strerror(file_.get()),
           "); save or copy the file again");
  }
}

void NpzArchive::Close::operator()(zip* archive) const {
  zip_discard(archive);
}

NpzArchive::NpzArchive(const std::filesystem::path& path) : name_(path.string()) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    refuse(name_, std::filesystem::exists(path, error) ? ": is not a regular file" : ": no such file",
           ", expected a .npz archive; check the path");
  }
  bytes_ = static_cast<Index>(std::filesystem::file_size(path));
  int code = 0;
  archive_.reset(zip_open(path.c_str(), ZIP_RDONLY, &code));
  if (!archive_) {
    refuse(name_, ": cannot be read as a .npz archive (", zip_reason(code), "); save it with numpy.savez");
  }
  const Index count = zip_get_num_entries(archive_.get(), 0);
  for (Index entry = 0; entry < count; ++entry) {
    std::string array = stat_entry(archive_.get(), entry, name_).name;
    if (!array.ends_with(".npy")) {
      refuse(name_, ": holds ", in_quotes(array), ", expected only .npy arrays; save it with numpy.savez");
    }
    array.resize(array.size() - 4);
    if (!entries_.emplace(array, entry).second) {
      refuse(name_, ": holds the array ", in_quotes(array), " twice; save it again");
    }
  }
}

std::vector<std::string> NpzArchive::arrays() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) {
    names.push_back(name);
  }
  return names;
}

NpyReader NpzArchive::open(const std::string& array) const {
  const auto entry = entries_.find(array);
  if (entry == entries_.end()) {
    refuse(name_, ": the array '", array, "' is missing; see traces/README.md for what a .npz trace holds");
  }
  return {archive_.get(), entry->second, name_ + ":/" + array, bytes_};
}

}  // namespace hae::traces
