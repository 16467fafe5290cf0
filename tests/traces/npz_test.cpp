#include "traces/npz.hpp"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/traces/imported.hpp"
#include "traces/check.hpp"

namespace hae::traces::test {
namespace {

// ---- a .npz, byte by byte

template <typename Number>
std::string bytes_of(const std::vector<Number>& values, bool big_endian = false) {
  std::string bytes;
  for (const Number value : values) {
    std::string one(reinterpret_cast<const char*>(&value), sizeof value);
    if (big_endian == (std::endian::native == std::endian::little)) {
      one = {one.rbegin(), one.rend()};
    }
    bytes += one;
  }
  return bytes;
}

std::string little(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) {
    text += static_cast<char>(value >> (8 * i));
  }
  return text;
}

/// A version 1 header (two bytes of length), the dictionary as numpy writes it, then the data.
std::string npy(const std::string& descr, const std::vector<Index>& shape, const std::string& data,
                const std::string& fortran = "False", char version = 1) {
  std::string tuple;
  for (const Index extent : shape) {
    tuple += std::to_string(extent) + ", ";
  }
  const std::string type = descr.starts_with("[") ? descr : "'" + descr + "'";
  const std::string header =
      "{'descr': " + type + ", 'fortran_order': " + fortran + ", 'shape': (" + tuple + "), }     \n";
  return std::string("\x93NUMPY") + version + '\0' + little(header.size(), version == 1 ? 2 : 4) + header +
         data;
}

std::uint32_t crc32(const std::string& bytes) {
  std::uint32_t crc = ~0u;
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1u)));
    }
  }
  return ~crc;
}

/// One deflate block of type 0 (stored) a 65535 bytes: a valid deflate stream without a compressor.
std::string deflated(const std::string& bytes) {
  std::string stream;
  for (std::size_t begin = 0; begin == 0 || begin < bytes.size(); begin += 65535) {
    const std::string part = bytes.substr(begin, 65535);
    stream += static_cast<char>(begin + part.size() == bytes.size() ? 1 : 0);
    stream += little(part.size(), 2) + little(~part.size(), 2) + part;
  }
  return stream;
}

struct Entry {
  std::string name;
  std::string content;
  bool deflate = false;
  std::optional<std::uint32_t> declared_size = std::nullopt;
  std::optional<int> method = std::nullopt;
  int flags = 0;
  std::optional<std::uint64_t> zip64_size = std::nullopt;  ///< declared in an extra field of 64 bits
};

std::string zip(const std::vector<Entry>& entries) {
  std::string file;
  std::string directory;
  for (const Entry& entry : entries) {
    const std::string stored = entry.deflate ? deflated(entry.content) : entry.content;
    const std::uint64_t size = entry.declared_size.value_or(static_cast<std::uint32_t>(entry.content.size()));
    // Extra field 1 holds the sizes when the fields of 32 bits say FFFFFFFF.
    const std::string extra = entry.zip64_size ? little(1, 2) + little(16, 2) + little(*entry.zip64_size, 8) +
                                                     little(stored.size(), 8)
                                               : "";
    const std::string sizes =
        entry.zip64_size ? std::string(8, '\xFF') : little(stored.size(), 4) + little(size, 4);
    const std::string fields =
        little(entry.zip64_size ? 45 : 20, 2) + little(static_cast<std::uint64_t>(entry.flags), 2) +
        little(static_cast<std::uint64_t>(entry.method.value_or(entry.deflate ? 8 : 0)), 2) + little(0, 2) +
        little(33, 2) + little(crc32(entry.content), 4) + sizes + little(entry.name.size(), 2) +
        little(extra.size(), 2);
    directory += "PK\1\2" + little(45, 2) + fields + little(0, 2) + little(0, 2) + little(0, 2) +
                 little(0, 4) + little(file.size(), 4) + entry.name + extra;
    file += "PK\3\4" + fields + entry.name + extra + stored;
  }
  const std::string end = std::string("PK\5\6") + little(0, 2) + little(0, 2) + little(entries.size(), 2) +
                          little(entries.size(), 2) + little(directory.size(), 4) + little(file.size(), 4) +
                          little(0, 2);
  return file + directory + end;
}

// ---- arrays of 1 layer, 2 query heads, 1 KV head, 3 tokens, 2 dimensions

std::vector<float> counting(int count, float first = 0) {
  std::vector<float> values(static_cast<std::size_t>(count));
  std::iota(values.begin(), values.end(), first);
  return values;
}

Entry prompt(Index value = 2) {
  return {"prompt.npy", npy("<i8", {}, bytes_of<Index>({value}))};
}

std::vector<Entry> qkv_entries() {
  return {{"q.npy", npy("<f4", {1, 2, 3, 2}, bytes_of(counting(12)))},
          {"k.npy", npy("<f4", {1, 1, 3, 2}, bytes_of(counting(6, 100)))},
          {"v.npy", npy("<f4", {1, 1, 3, 2}, bytes_of(counting(6, 200)))},
          prompt()};
}

/// Causal rows of 3 tokens for 2 heads: (1), (1/2, 1/2), (1/4, 1/4, 1/2), and for head 1 (1), (1, 0), (0, 0,
/// 1).
std::vector<float> attention_values() {
  return {1, 0, 0, 0.5F, 0.5F, 0, 0.25F, 0.25F, 0.5F, 1, 0, 0, 1, 0, 0, 0, 0, 1};
}

std::vector<Entry> attention_entries() {
  return {{"attention.npy", npy("<f4", {1, 2, 3, 3}, bytes_of(attention_values()))}, prompt()};
}

std::vector<Entry> with(std::vector<Entry> entries, const Entry& entry) {
  for (Entry& old : entries) {
    if (old.name == entry.name) {
      old = entry;
      return entries;
    }
  }
  entries.push_back(entry);
  return entries;
}

std::vector<Entry> without(std::vector<Entry> entries, const std::string& name) {
  std::erase_if(entries, [&](const Entry& entry) { return entry.name == name; });
  return entries;
}

/// An imported trace.
class Imported : public ImportedTrace {
 public:
  explicit Imported(const std::vector<Entry>& entries, const NpzOptions& options = {}) {
    write_bytes(scratch() / "in.npz", zip(entries));
    import_npz(scratch() / "in.npz", to(), options);
    open();
  }
};

void expect_import_refused(const std::string& archive, const std::vector<std::string>& words,
                           const NpzOptions& options = {}) {
  const Scratch scratch;
  const std::filesystem::path path = scratch / "in.npz";
  write_bytes(path, archive);
  expect_import_error<TraceError>([&](const auto& to) { import_npz(path, to, options); }, words,
                                  path.string());
}

void expect_import_refused(const std::vector<Entry>& entries, const std::vector<std::string>& words,
                           const NpzOptions& options = {}) {
  expect_import_refused(zip(entries), words, options);
}

// ---- what is read

TEST(Npz, ImportsQueriesKeysAndValues) {
  Imported imported(qkv_entries());
  const SequenceInfo& info = imported.info();
  EXPECT_EQ(info.name, "in");
  EXPECT_EQ(info.payload, Payload::qkv);
  EXPECT_EQ(info.layers, 1);
  EXPECT_EQ(info.query_heads, 2);
  EXPECT_EQ(info.kv_heads, 1);
  EXPECT_EQ(info.head_dim, 2);
  EXPECT_EQ(info.element_bytes, 4);
  EXPECT_EQ(info.tokens, 3);
  EXPECT_EQ(info.prompt, 2);
  EXPECT_EQ(info.generated, 2);
  EXPECT_EQ(info.scale, 1 / std::sqrt(2.0));
  EXPECT_EQ(info.image, (std::vector<Index>{-1, -1, -1}));
  EXPECT_EQ(info.masks, std::vector<MaskRule>(1));
  EXPECT_EQ(imported.queries(), counting(12));
  EXPECT_EQ(imported.keys(), counting(6, 100));
  EXPECT_EQ(imported.values(), counting(6, 200));
}

TEST(Npz, CutsAttentionIntoPromptAndDecodeRows) {
  Imported imported(attention_entries());
  EXPECT_EQ(imported.info().payload, Payload::attention);
  EXPECT_EQ(imported.info().kv_heads, 2);  // as many as query heads, unless told
  EXPECT_EQ(imported.info().head_dim, std::nullopt);
  EXPECT_EQ(imported.info().element_bytes, std::nullopt);
  EXPECT_FALSE(imported.info().has_values);
  EXPECT_EQ(imported.prompt_rows(), (std::vector<float>{1, 0, 0.5F, 0.5F, 1, 0, 1, 0}));
  EXPECT_EQ(imported.first_step(), (std::vector<float>{0.25F, 0.25F, 0.5F, 0, 0, 1}));
  EXPECT_EQ(check_trace(imported.trace()).total, 0);
}

TEST(Npz, ReadsEveryStorageOfTheSameNumbers) {
  std::vector<std::uint16_t> halves;
  for (const float value : counting(6, 100)) {
    halves.push_back(half_from_float(value));
  }
  // Fortran order of [1, 1, 3, 2]: the token index varies fastest.
  const std::vector<float> fortran{100, 102, 104, 101, 103, 105};
  const std::vector<Entry> stored{
      {"k.npy", npy("<f4", {1, 1, 3, 2}, bytes_of(counting(6, 100))), true},
      {"k.npy", npy(">f4", {1, 1, 3, 2}, bytes_of(counting(6, 100), true))},
      {"k.npy", npy("<f4", {1, 1, 3, 2}, bytes_of(fortran), "True")},
      {"k.npy", npy(">f4", {1, 1, 3, 2}, bytes_of(fortran, true), "True"), true},
      {"k.npy", npy("<f4", {1, 1, 3, 2}, bytes_of(counting(6, 100)), "False", 2)},
      {"k.npy", npy("<f4", {1, 1, 3, 2}, bytes_of(counting(6, 100)), "False", 3)},
  };
  for (const Entry& entry : stored) {
    EXPECT_EQ(Imported(with(qkv_entries(), entry)).keys(), counting(6, 100));
  }
  std::vector<Entry> all_half;
  for (const Entry& entry : qkv_entries()) {
    const bool q = entry.name == "q.npy";
    const std::vector<std::uint16_t> codes = q ? std::vector<std::uint16_t>(12, 0x3C00) : halves;
    all_half.push_back(entry.name == "prompt.npy"
                           ? entry
                           : Entry{entry.name, npy("<f2", {1, q ? 2 : 1, 3, 2}, bytes_of(codes))});
  }
  Imported half(all_half);
  EXPECT_EQ(half.keys(), counting(6, 100));
  EXPECT_EQ(half.info().element_bytes, 2);
  EXPECT_EQ(half.trace().datasets(0).back().type, "float16");
}

TEST(Npz, ReadsFortranOrderOfFourRealAxes) {
  // [2 layers, 2 heads, 3 tokens, 2 dimensions], element (l, h, t, d) = 1000 l + 100 h + 10 t + d.
  std::vector<float> c_order;
  for (int l = 0; l < 2; ++l) {
    for (int h = 0; h < 2; ++h) {
      for (int t = 0; t < 3; ++t) {
        for (int d = 0; d < 2; ++d) {
          c_order.push_back(static_cast<float>(1000 * l + 100 * h + 10 * t + d));
        }
      }
    }
  }
  std::vector<float> fortran;
  for (int d = 0; d < 2; ++d) {
    for (int t = 0; t < 3; ++t) {
      for (int h = 0; h < 2; ++h) {
        for (int l = 0; l < 2; ++l) {
          fortran.push_back(static_cast<float>(1000 * l + 100 * h + 10 * t + d));
        }
      }
    }
  }
  const std::string k = npy("<f4", {2, 2, 3, 2}, bytes_of(fortran), "True");
  Imported imported(
      {{"q.npy", npy("<f4", {2, 2, 3, 2}, bytes_of(c_order))}, {"k.npy", k}, {"v.npy", k}, prompt()});
  const auto second = imported.trace().open(0)->layer(1);
  const View<const float, 3> keys = second->keys();
  EXPECT_EQ(std::vector(keys.data(), keys.data() + keys.size()),
            std::vector(c_order.begin() + 12, c_order.end()));
}

TEST(Npz, ReadsOptionalArraysOfAnyIntegerType) {
  const std::vector<Entry> entries =
      with(with(with(with(qkv_entries(), {"modality.npy", npy("|u1", {3}, std::string("\1\0\1", 3))}),
                     {"image.npy", npy(">i2", {3}, bytes_of<std::int16_t>({5, -1, 5}, true))}),
                {"window.npy", npy("<u4", {1}, bytes_of<std::uint32_t>({2}))}),
           {"scale.npy", npy("<f8", {}, bytes_of<double>({0.1}))});
  Imported imported(entries);
  EXPECT_EQ(imported.info().image, (std::vector<Index>{5, -1, 5}));
  EXPECT_EQ(imported.info().masks[0].window, 2);
  EXPECT_EQ(imported.info().scale, 0.1);
  EXPECT_EQ(Imported(with(qkv_entries(), {"prompt.npy", npy("|i1", {1}, "\3")})).info().prompt, 3);
  EXPECT_EQ(Imported(with(qkv_entries(), {"scale.npy", npy("<i4", {}, bytes_of<int>({2}))})).info().scale, 2);
  EXPECT_EQ(
      Imported(with(qkv_entries(), {"scale.npy", npy("<f4", {}, bytes_of<float>({0.5F}))})).info().scale,
      0.5);
}

TEST(Npz, MakesOneImageOfEachContiguousVisualSpan) {
  EXPECT_EQ(
      Imported(with(qkv_entries(), {"modality.npy", npy("|i1", {3}, std::string("\1\0\1", 3))})).info().image,
      (std::vector<Index>{0, -1, 1}));
  EXPECT_EQ(
      Imported(with(qkv_entries(), {"modality.npy", npy("|i1", {3}, std::string("\0\1\1", 3))})).info().image,
      (std::vector<Index>{-1, 0, 0}));
}

TEST(Npz, ReadsTokensAsTextAndAsBytes) {
  // U2: two code points of four bytes each; "é" is E9, "猫" is 732B, "😀" is 1F600.
  const std::vector<std::uint32_t> points{'a', 0xE9, 0x732B, 0, 0x1F600, 0};
  const std::vector<std::string> expected{"a\xC3\xA9", "\xE7\x8C\xAB", "\xF0\x9F\x98\x80"};
  EXPECT_EQ(Imported(with(qkv_entries(), {"tokens.npy", npy("<U2", {3}, bytes_of(points))}))
                .trace()
                .details(0)
                .token,
            expected);
  EXPECT_EQ(Imported(with(qkv_entries(), {"tokens.npy", npy(">U2", {3}, bytes_of(points, true))}))
                .trace()
                .details(0)
                .token,
            expected);
  EXPECT_EQ(Imported(with(qkv_entries(), {"tokens.npy", npy("|S2", {3}, std::string("ab\0\0c\0", 6))}))
                .trace()
                .details(0)
                .token,
            (std::vector<std::string>{"ab", "", "c"}));
}

TEST(Npz, KnowsBytesOfAttentionWhenToldTheHeads) {
  const std::vector<Entry> told =
      with(with(attention_entries(), {"kv_heads.npy", npy("<i8", {}, bytes_of<Index>({1}))}),
           {"head_dim.npy", npy("<i8", {}, bytes_of<Index>({64}))});
  EXPECT_EQ(Imported(told).info().kv_heads, 1);
  EXPECT_EQ(Imported(told).info().head_dim, 64);
  EXPECT_EQ(Imported(told).info().element_bytes, 4);
  Imported with_v(with(attention_entries(), {"v.npy", npy("<f4", {1, 1, 3, 2}, bytes_of(counting(6)))}));
  EXPECT_EQ(with_v.info().kv_heads, 1);
  EXPECT_EQ(with_v.info().head_dim, 2);
  EXPECT_EQ(with_v.values(), counting(6));
}

TEST(Npz, TakesANameAndItsOrigin) {
  NpzOptions options;
  options.name = "a dog";
  options.origin = {"hae import", "", "hae import dog.npz"};
  Imported imported(qkv_entries(), options);
  EXPECT_EQ(imported.info().name, "a dog");
  EXPECT_EQ(imported.trace().origin(), options.origin);
}

// ---- what is refused

TEST(NpzRefuses, FilesThatAreNoArchive) {
  expect_import_refused("no zip at all", {"cannot be read as a .npz archive"});
  expect_import_refused(zip(qkv_entries()).substr(0, 300), {"cannot be read as a .npz archive"});
  EXPECT_THROW(import_npz("/nowhere.npz", "/tmp/out.h5", {}), TraceError);
  EXPECT_THROW(import_npz("/", "/tmp/out.h5", {}), TraceError);
}

TEST(NpzRefuses, ArraysNobodyReadsByName) {
  const std::string one = npy("<i8", {}, bytes_of<Index>({1}));
  expect_import_refused(with(qkv_entries(), {"modalty.npy", one}), {"'modalty'"});
  expect_import_refused(with(attention_entries(), {"window.npy", one}), {"'window'"});
  expect_import_refused(with(attention_entries(), {"q.npy", one}), {"'q'"});
  expect_import_refused(with(qkv_entries(), {"kv_heads.npy", one}), {"'kv_heads'"});
  const Entry v{"v.npy", npy("<f4", {1, 1, 3, 2}, bytes_of(counting(6)))};
  expect_import_refused(with(with(attention_entries(), v), {"head_dim.npy", one}), {"'head_dim'"});
  expect_import_refused(with(qkv_entries(), {"readme.txt", "hello"}), {"'readme.txt'", "only .npy"});
}

TEST(NpzRefuses, MissingArraysByName) {
  for (const char* name : {"q", "k", "v", "prompt"}) {
    expect_import_refused(without(qkv_entries(), std::string(name) + ".npy"),
                          {std::string("the array '") + name + "' is missing"});
  }
  expect_import_refused(without(attention_entries(), "prompt.npy"), {"'prompt' is missing"});
}

TEST(NpzRefuses, ShapesThatDisagree) {
  expect_import_refused(with(qkv_entries(), {"q.npy", npy("<f4", {2, 3, 2}, bytes_of(counting(12)))}),
                        {"/q: found shape [2, 3, 2]", "[layers, query_heads, tokens, head_dim]"});
  expect_import_refused(with(qkv_entries(), {"k.npy", npy("<f4", {1, 1, 2, 3}, bytes_of(counting(6)))}),
                        {"/k: found shape [1, 1, 2, 3]", "= [1, 1, 3, 2]"});
  expect_import_refused(with(qkv_entries(), {"v.npy", npy("<f4", {1, 2, 3, 1}, bytes_of(counting(6)))}),
                        {"/v: found shape"});
  expect_import_refused(
      with(attention_entries(), {"attention.npy", npy("<f4", {1, 1, 3, 6}, bytes_of(counting(18)))}),
      {"/attention: found shape [1, 1, 3, 6]"});
  expect_import_refused(with(qkv_entries(), {"modality.npy", npy("|u1", {2}, "\1\1")}),
                        {"/modality: found shape [2]", "[tokens] = [3]"});
  expect_import_refused(with(qkv_entries(), {"window.npy", npy("|u1", {2}, "\1\1")}),
                        {"/window: found shape [2]", "[layers] = [1]"});
  expect_import_refused(with(qkv_entries(), {"tokens.npy", npy("|S1", {2}, "ab")}),
                        {"/tokens: found shape [2]"});
  expect_import_refused(with(qkv_entries(), {"prompt.npy", npy("<i8", {2}, bytes_of<Index>({1, 2}))}),
                        {"/prompt: found shape [2]", "one number"});
}

TEST(NpzRefuses, HeadsThatDoNotDivide) {
  expect_import_refused(with(attention_entries(), {"kv_heads.npy", npy("<i8", {}, bytes_of<Index>({3}))}),
                        {"2 query heads", "3 KV heads"});
  expect_import_refused(with(attention_entries(), {"kv_heads.npy", npy("<i8", {}, bytes_of<Index>({0}))}),
                        {"kv_heads is 0"});
}

TEST(NpzRefuses, PromptsImagesAndModalityOutOfRange) {
  expect_import_refused(with(qkv_entries(), prompt(0)), {"/prompt: found 0, expected 1 .. 3"});
  expect_import_refused(with(qkv_entries(), prompt(4)), {"/prompt: found 4, expected 1 .. 3"});
  expect_import_refused(with(qkv_entries(), {"modality.npy", npy("|u1", {3}, std::string("\0\2\0", 3))}),
                        {"/modality[1]: found 2"});
  const Entry image{"image.npy", npy("|i1", {3}, std::string("\xFF\0\xFF", 3))};
  EXPECT_EQ(Imported(with(qkv_entries(), image)).info().image, (std::vector<Index>{-1, 0, -1}));
  expect_import_refused(
      with(with(qkv_entries(), image), {"modality.npy", npy("|u1", {3}, std::string("\0\1\1", 3))}),
      {"/image[2]: found -1"});
  expect_import_refused(with(qkv_entries(), {"image.npy", npy("|i1", {3}, std::string("\xFE\0\0", 3))}),
                        {"/image[0]: found -2"});
}

TEST(NpzRefuses, TypesItDoesNotTake) {
  expect_import_refused(with(qkv_entries(), {"k.npy", npy("<f8", {1, 1, 3, 2}, std::string(48, '\0'))}),
                        {"/k: found float64"});
  expect_import_refused(with(qkv_entries(), {"k.npy", npy("<f2", {1, 1, 3, 2}, std::string(12, '\0'))}),
                        {"/k: found float16, expected float32"});
  expect_import_refused(with(qkv_entries(), {"k.npy", npy("|V2", {1, 1, 3, 2}, std::string(12, '\0'))}),
                        {"/k: found dtype kind 'V'"});
  expect_import_refused(with(qkv_entries(), {"k.npy", npy("|O", {1, 1, 3, 2}, "pickle")}),
                        {"/k: holds Python objects"});
  expect_import_refused(with(qkv_entries(), {"k.npy", npy("[('a', '<f4')]", {1, 1, 3, 2}, "")}),
                        {"/k: holds records"});
  expect_import_refused(with(qkv_entries(), {"prompt.npy", npy("<f8", {}, bytes_of<double>({2.0}))}),
                        {"/prompt: found float64, expected integers"});
  expect_import_refused(with(qkv_entries(), {"modality.npy", npy("|b1", {3}, std::string(3, '\0'))}),
                        {"/modality: found bool"});
  expect_import_refused(with(qkv_entries(), {"tokens.npy", npy("<i8", {3}, std::string(24, '\0'))}),
                        {"/tokens: found int64, expected strings"});
  expect_import_refused(with(qkv_entries(), {"prompt.npy", npy("<u8", {}, std::string(8, '\xFF'))}),
                        {"/prompt[0]: found 18446744073709551615"});
}

TEST(NpzRefuses, DamagedHeaders) {
  expect_import_refused(with(qkv_entries(), {"k.npy", "no array"}), {"/k: not a .npy array"});
  expect_import_refused(with(qkv_entries(), {"k.npy", ""}), {"/k: ends early"});
  std::string broken = npy("<f4", {1, 1, 3, 2}, bytes_of(counting(6)));
  broken[broken.find("shape")] = 'S';
  expect_import_refused(with(qkv_entries(), {"k.npy", broken}), {"/k: its .npy header is damaged"});
  std::string negative = npy("<f4", {1, 1, 3, -2}, bytes_of(counting(6)));
  expect_import_refused(with(qkv_entries(), {"k.npy", negative}), {"/k: its .npy header is damaged"});
  std::string long_header = std::string("\x93NUMPY\2\0", 8) + little(1u << 30, 4);
  expect_import_refused(with(qkv_entries(), {"k.npy", long_header}),
                        {"/k: its .npy header has 1073741824 bytes"});
}

TEST(NpzRefuses, SizesThatAreOnlyDeclared) {
  const std::string bomb = npy("<f4", {1, 1, Index{1} << 40, 2}, bytes_of(counting(6)));
  expect_import_refused(with(qkv_entries(), {"k.npy", bomb}),
                        {"/k: its shape [1, 1, 1099511627776, 2]", "does not fit"});
  const std::string overflow = npy("<f4", {Index{1} << 40, Index{1} << 40, 1, 1}, "");
  expect_import_refused(with(qkv_entries(), {"k.npy", overflow}), {"/k: its shape", "does not fit"});
  const std::string k = npy("<f4", {1, 1, 3, 2}, bytes_of(counting(6)));
  expect_import_refused(with(qkv_entries(), {"k.npy", k, true, 0xFFFFFF00u}),
                        {"/k: declares 4294967040 bytes but stores"});
  expect_import_refused(with(qkv_entries(), {"k.npy", k, false, std::nullopt, 14}),
                        {"/k: compressed by zip method 14"});
}

TEST(NpzRefuses, SizesOf64BitsThatLie) {
  const std::string k = npy("<f4", {1, 1, 3, 2}, bytes_of(counting(6, 100)));
  const auto declaring = [&](std::uint64_t size) {
    Entry entry{"k.npy", k};
    entry.zip64_size = size;
    return with(qkv_entries(), entry);
  };
  EXPECT_EQ(Imported(declaring(k.size())).keys(), counting(6, 100));
  expect_import_refused(declaring(std::uint64_t{1} << 60),
                        {"/k: declares 1152921504606846976 bytes but stores"});
}

TEST(NpzRefuses, StreamsLongerThanTheyDeclare) {
  const std::string k = npy("<f4", {1, 1, 3, 2}, bytes_of(counting(6, 100)));
  Entry bomb{"k.npy", k + std::string(1 << 26, '\0'), true};
  bomb.declared_size = static_cast<std::uint32_t>(k.size());
  expect_import_refused(with(qkv_entries(), bomb), {"/k:"});
}

TEST(NpzRefuses, ListsByTheGigabyteThatNoBytesStandFor) {
  // An array of no bytes may have any extents: 2^40 tokens of heads without dimensions.
  const Index tokens = Index{1} << 40;
  const std::string empty = npy("<f4", {1, 1, tokens, 0}, "");
  const std::vector<Entry> entries{{"q.npy", empty}, {"k.npy", empty}, {"v.npy", empty}, prompt(1 << 30)};
  expect_import_refused(entries, {"has 1099511627776 tokens, expected 1 .. 16777216"});
  const std::string no_layers = npy("<f4", {0, 1, 3, 2}, "");
  expect_import_refused({{"q.npy", no_layers}, {"k.npy", no_layers}, {"v.npy", no_layers}, prompt()},
                        {"has 0 layers"});
}

TEST(NpzRefuses, EncryptedArrays) {
  Entry entry = qkv_entries()[1];
  entry.flags = 1;
  expect_import_refused(with(qkv_entries(), entry), {"/k: encrypted"});
}

TEST(NpzRefuses, NamesThatLeadOutOfTheArchive) {
  for (const char* name : {"../q", "/etc/q", "q/../../q", "a/q"}) {
    std::vector<Entry> entries = qkv_entries();
    entries.push_back({std::string(name) + ".npy", entries[0].content});
    expect_import_refused(entries, {std::string("holds '") + name + "', which an archive"});
  }
}

TEST(NpzRefuses, WhatDoesNotFitTheLimitInMemory) {
  NpzOptions options;
  options.largest_array_bytes = 20;
  const std::string fortran = npy("<f4", {1, 1, 3, 2}, bytes_of(counting(6)), "True");
  expect_import_refused(with(qkv_entries(), {"k.npy", fortran}),
                        {"/k: has 24 bytes", "at most 20", "C order"}, options);
  EXPECT_EQ(Imported(qkv_entries(), options).keys(), counting(6, 100));  // C order is streamed
}

TEST(NpzRefuses, DamagedBytesByTheirChecksum) {
  std::string archive = zip(qkv_entries());
  const std::size_t data = archive.find(bytes_of(counting(6, 100)));
  archive[data] = static_cast<char>(archive[data] ^ 1);
  expect_import_refused(archive, {"/k:"});
}

TEST(NpzRefuses, ArraysNamedTwice) {
  std::vector<Entry> entries = qkv_entries();
  entries.push_back(entries[1]);
  expect_import_refused(entries, {"'k' twice"});
}

TEST(NpzRefuses, NumbersThatAreNotFiniteNamingThePlace) {
  std::vector<float> k = counting(6);
  k[3] = std::numeric_limits<float>::quiet_NaN();  // layer 0, head 0, token 1, dimension 1
  expect_import_refused(with(qkv_entries(), {"k.npy", npy("<f4", {1, 1, 3, 2}, bytes_of(k))}),
                        {"/k[0, 0, 1, 1]: found a NaN"});
}

TEST(NpzRefuses, RowsThatAreNoAttentionNamingThePlace) {
  const auto spoilt = [](std::size_t element, float value) {
    std::vector<float> values = attention_values();
    values[element] = value;
    return with(attention_entries(), {"attention.npy", npy("<f4", {1, 2, 3, 3}, bytes_of(values))});
  };
  // Element 2 is head 0, query 0, key 2; element 11 head 1, query 0, key 2: neither may be seen.
  expect_import_refused(spoilt(2, 0.25F), {"/attention[0, 0, 0]: key 2 has weight 0.25, expected 0"});
  expect_import_refused(spoilt(11, 1e-30F), {"/attention[0, 1, 0]: key 2"});
  expect_import_refused(spoilt(6, 0.5F), {"/attention[0, 0, 2]: sums to 1.25"});
  expect_import_refused(spoilt(7, -0.25F), {"/attention[0, 0, 2]: key 1 has weight -0.25"});
  expect_import_refused(spoilt(0, std::numeric_limits<float>::infinity()),
                        {"/attention[0, 0, 0]: key 0 has weight +infinity"});
  EXPECT_NO_THROW(Imported(spoilt(0, 0)));  // a row of zeros is masked, not wrong
}

}  // namespace
}  // namespace hae::traces::test
