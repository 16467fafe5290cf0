#include "traces/kvp.hpp"

#include <sys/stat.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>

#include "tests/traces/imported.hpp"
#include "traces/float16.hpp"

namespace hae::traces::test {
namespace {

namespace fs = std::filesystem;

// ---- a .safetensors file, byte by byte

std::string little(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) {
    text += static_cast<char>(value >> (8 * i));
  }
  return text;
}

std::string floats(const std::vector<float>& values) {
  std::string bytes;
  for (const float value : values) {
    bytes += little(std::bit_cast<std::uint32_t>(value), 4);
  }
  return bytes;
}

std::string codes(const std::vector<std::uint16_t>& values) {
  std::string bytes;
  for (const std::uint16_t value : values) {
    bytes += little(value, 2);
  }
  return bytes;
}

std::string with_header(const std::string& header, const std::string& data) {
  return little(header.size(), 8) + header + data;
}

struct Tensor {
  std::string dtype;
  std::vector<Index> shape;
  std::string data;
};

std::string field(const std::string& name, const Tensor& tensor, std::size_t begin) {
  std::string shape;
  for (const Index extent : tensor.shape) {
    shape += (shape.empty() ? "" : ",") + std::to_string(extent);
  }
  return "\"" + name + "\":{\"dtype\":\"" + tensor.dtype + "\",\"shape\":[" + shape + "],\"data_offsets\":[" +
         std::to_string(begin) + "," + std::to_string(begin + tensor.data.size()) + "]}";
}

using Tensors = std::map<std::string, Tensor>;

std::string safetensors(const Tensors& tensors) {
  std::string header;
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    header += (header.empty() ? "{" : ",") + field(name, tensor, data.size());
    data += tensor.data;
  }
  return with_header(header + "}", data);
}

// ---- recordings of 2 layers, 2 KV heads, 3 query heads each, 3 tokens, 2 dimensions

std::vector<float> counting(int count, float first) {
  std::vector<float> values(static_cast<std::size_t>(count));
  std::iota(values.begin(), values.end(), first);
  return values;
}

/// Element i of layer l, KV head h: q_group 1000 l + 100 h + i, k 50 more, v 60 more.
Tensors tensors_of(int layer, int kv_head) {
  const auto first = static_cast<float>(1000 * layer + 100 * kv_head);
  return {{"q_group", {"F32", {3, 3, 2}, floats(counting(18, first))}},
          {"k", {"F32", {3, 2}, floats(counting(6, first + 50))}},
          {"v", {"F32", {3, 2}, floats(counting(6, first + 60))}}};
}

/// Relative path -> content.
using Recording = std::map<std::string, std::string>;

std::string path_of(const std::string& layer, const std::string& kv_head) {
  return "layer_" + layer + "/kv_head_" + kv_head + "/attention_tensors.safetensors";
}

const std::string kLast = path_of("000001", "001");

Recording recording() {
  Recording files;
  for (int layer = 0; layer < 2; ++layer) {
    for (int kv_head = 0; kv_head < 2; ++kv_head) {
      files[path_of("00000" + std::to_string(layer), "00" + std::to_string(kv_head))] =
          safetensors(tensors_of(layer, kv_head));
    }
  }
  return files;
}

/// The recording with its last file replaced.
Recording with_last(const std::string& content) {
  Recording files = recording();
  files[kLast] = content;
  return files;
}

Recording with_last(const std::string& name, const Tensor& tensor) {
  Tensors tensors = tensors_of(1, 1);
  tensors[name] = tensor;
  return with_last(safetensors(tensors));
}

void write(const fs::path& directory, const Recording& files) {
  fs::create_directories(directory);
  for (const auto& [path, content] : files) {
    fs::create_directories((directory / path).parent_path());
    write_bytes(directory / path, content);
  }
}

KvpOptions of_prompt(Index prompt, std::vector<Range> images = {}) {
  KvpOptions options;
  options.sequence.prompt = prompt;
  options.sequence.images = std::move(images);
  return options;
}

class Imported : public ImportedTrace {
 public:
  explicit Imported(const Recording& files, const KvpOptions& options = of_prompt(2)) {
    write(scratch() / "sample", files);
    import_kvp(scratch() / "sample/", to(), options);
    open();
  }
};

void expect_import_refused(const fs::path& directory, const std::vector<std::string>& words,
                           const KvpOptions& options = of_prompt(2)) {
  expect_import_error<TraceError>([&](const fs::path& to) { import_kvp(directory, to, options); }, words,
                                  directory.string());
}

void expect_import_refused(const Recording& files, const std::vector<std::string>& words) {
  const Scratch scratch;
  write(scratch / "sample", files);
  expect_import_refused(scratch / "sample", words);
}

void expect_rejected(const KvpOptions& options, const std::string& word) {
  const Scratch scratch;
  write(scratch / "sample", recording());
  expect_import_error<ConfigError>([&](const fs::path& to) { import_kvp(scratch / "sample", to, options); },
                                   {word});
}

std::vector<float> joined(std::vector<float> first, const std::vector<float>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// ---- what is read

TEST(Kvp, PutsTheQueriesOfAKvHeadSideBySide) {
  Imported imported(recording());
  const SequenceInfo& info = imported.info();
  EXPECT_EQ(info.name, "sample");
  EXPECT_EQ(info.group, "sample");
  EXPECT_EQ(info.payload, Payload::qkv);
  EXPECT_EQ(info.layers, 2);
  EXPECT_EQ(info.query_heads, 6);
  EXPECT_EQ(info.kv_heads, 2);
  EXPECT_EQ(info.head_dim, 2);
  EXPECT_EQ(info.element_bytes, 4);
  EXPECT_EQ(info.tokens, 3);
  EXPECT_EQ(info.prompt, 2);
  EXPECT_EQ(info.generated, 2);
  EXPECT_EQ(info.scale, 1 / std::sqrt(2.0));
  EXPECT_EQ(info.image, (std::vector<Index>{-1, -1, -1}));
  EXPECT_EQ(info.masks, std::vector<MaskRule>(2));
  for (Index layer = 0; layer < 2; ++layer) {
    // Query head 3 * kv_head + i is q_group[i], so the groups follow one another.
    const auto first = static_cast<float>(1000 * layer);
    EXPECT_EQ(imported.queries(layer), joined(counting(18, first), counting(18, first + 100)));
    EXPECT_EQ(imported.keys(layer), joined(counting(6, first + 50), counting(6, first + 150)));
    EXPECT_EQ(imported.values(layer), joined(counting(6, first + 60), counting(6, first + 160)));
  }
}

TEST(Kvp, KnowsWhatItIsTold) {
  KvpOptions options = of_prompt(3, {{1, 3}});
  options.scale = 0.1;
  options.window = 2;
  options.sequence.name = "a dog";
  options.sequence.group = "dogs";
  options.sequence.origin = {"hae import", "", "hae import dog"};
  Imported imported(recording(), options);
  EXPECT_EQ(imported.info().image, (std::vector<Index>{-1, 0, 0}));
  EXPECT_EQ(imported.info().scale, 0.1);
  EXPECT_EQ(imported.info().masks[0].window, 2);
  EXPECT_EQ(imported.info().masks[1].window, 2);
  EXPECT_EQ(imported.info().name, "a dog");
  EXPECT_EQ(imported.info().group, "dogs");
  EXPECT_EQ(imported.trace().origin(), options.sequence.origin);
}

TEST(Kvp, KeepsEveryFiniteCodeOfAShortType) {
  // All 65,536 codes without those whose exponent is all ones (infinities, NaNs): 5 exponent bits leave
  // 65,536 - 2,048 = 63,488, 8 leave 65,536 - 256 = 65,280.
  for (const auto& [dtype, type, exponent] :
       {std::tuple{"F16", FloatType::float16, 0x7C00}, std::tuple{"BF16", FloatType::bfloat16, 0x7F80}}) {
    std::vector<std::uint16_t> finite;
    for (int code = 0; code < 65536; ++code) {
      if ((code & exponent) != exponent) {
        finite.push_back(static_cast<std::uint16_t>(code));
      }
    }
    ASSERT_EQ(finite.size(), type == FloatType::float16 ? 63488u : 65280u);
    const auto tokens = static_cast<Index>(finite.size() / 128);
    const std::string data = codes(finite);
    const std::string file = safetensors({{"q_group", {dtype, {1, tokens, 128}, data}},
                                          {"k", {dtype, {tokens, 128}, data}},
                                          {"v", {dtype, {tokens, 128}, data}}});
    Imported imported(Recording{{path_of("000000", "000"), file}});
    EXPECT_EQ(imported.trace().datasets(0).back().type, name_of(type));
    EXPECT_EQ(imported.info().element_bytes, 2);
    for (const std::vector<float>& read : {imported.queries(0), imported.keys(0), imported.values(0)}) {
      std::vector<std::uint16_t> back;
      for (const float value : read) {
        back.push_back(type == FloatType::float16 ? half_from_float(value) : bfloat16_from_float(value));
      }
      EXPECT_EQ(back, finite) << dtype;
    }
  }
}

TEST(Kvp, ReadsHeadersAsAnyWriterMayWriteThem) {
  // Metadata, white space, escapes, any order of tensors and fields, padding at the end.
  const Tensors tensors = tensors_of(1, 1);
  const std::string header =
      R"({ "__metadata__":{"format":"pt","note":"\u00e9"}, "v":{"data_offsets":[0,24],"dtype":"F32","shape":[3,2]},
 "\u006b":{"shape":[3,2],"data_offsets":[24,48],"dtype":"F32"},"q_group":{"dtype":"F32","shape":[3,3,2],
 "data_offsets":[48,120]}}     )";
  Imported imported(with_last(
      with_header(header, tensors.at("v").data + tensors.at("k").data + tensors.at("q_group").data)));
  EXPECT_EQ(imported.queries(1), joined(counting(18, 1000), counting(18, 1100)));
  EXPECT_EQ(imported.keys(1), joined(counting(6, 1050), counting(6, 1150)));
  EXPECT_EQ(imported.values(1), joined(counting(6, 1060), counting(6, 1160)));
}

TEST(Kvp, LeavesOtherFilesOfTheRecordingAlone) {
  // The program that makes these directories writes texts and token ids beside the layers.
  Recording files = recording();
  files["all_text.txt"] = "a dog";
  files["prompt_ntokens.safetensors"] = "whatever";
  files["layer_000000/input_pos.safetensors"] = "whatever";
  EXPECT_EQ(Imported(files).info().layers, 2);
}

TEST(Kvp, FollowsLinksToRegularFilesAndDirectories) {
  const Scratch scratch;
  write(scratch / "store", recording());
  fs::create_directory_symlink(scratch / "store", scratch / "sample");
  fs::rename(scratch / "store" / kLast, scratch / "blob");
  fs::create_symlink(scratch / "blob", scratch / "store" / kLast);
  import_kvp(scratch / "sample", scratch / "out.h5", of_prompt(2));
  EXPECT_EQ(TraceFile(scratch / "out.h5").open(0)->info().name, "sample");
}

TEST(Kvp, NamesTheSequenceAfterTheDirectoryHoweverItIsSpelt) {
  const Scratch scratch;
  write(scratch / "sample", recording());
  for (const char* path : {"sample", "sample/", "sample/.", "sample/layer_000000/.."}) {
    import_kvp(scratch / path, scratch / "out.h5", of_prompt(2));
    EXPECT_EQ(TraceFile(scratch / "out.h5").open(0)->info().name, "sample") << path;
  }
}

// ---- what is refused

TEST(KvpRefuses, PathsThatAreNoDirectory) {
  const Scratch scratch;
  expect_import_refused(scratch / "nowhere", {": no such directory"});
  write_bytes(scratch / "file", "");
  expect_import_refused(scratch / "file", {": is not a directory"});
}

TEST(KvpRefuses, GapsNamingWhatIsMissing) {
  const std::string content = safetensors(tensors_of(0, 0));
  expect_import_refused(Recording{{"all_text.txt", ""}}, {"/layer_000000: missing"});
  expect_import_refused(Recording{{path_of("000001", "000"), content}}, {"/layer_000000: missing"});
  Recording files = recording();
  files.erase(path_of("000001", "000"));
  expect_import_refused(files, {"/layer_000001/kv_head_000: missing, expected kv_head_000 .. kv_head_001"});
  files = recording();
  files.erase(kLast);
  expect_import_refused(files, {"/layer_000001/kv_head_001: missing, expected kv_head_000 .. kv_head_001"});
  files = recording();
  files[path_of("000001", "002")] = content;
  expect_import_refused(files, {"/layer_000001/kv_head_002: found, expected kv_head_000 .. kv_head_001"});
  files = recording();
  files[path_of("000003", "000")] = content;
  expect_import_refused(files, {"/layer_000002: missing, expected layer_000000 .. layer_000003"});
  files = recording();
  files["layer_000001/kv_head_001/readme.txt"] = "";
  files.erase(kLast);
  expect_import_refused(files, {kLast + ": missing"});
}

TEST(KvpRefuses, NumbersSpeltAnotherWay) {
  for (const char* name : {"layer_2", "layer_0000002", "layer_00002x", "layer_-00002"}) {
    Recording files = recording();
    files[std::string(name) + "/kv_head_000/attention_tensors.safetensors"] = "";
    expect_import_refused(files, {": holds '" + std::string(name) + "', expected layer_000000"});
  }
}

TEST(KvpRefuses, WhatIsNoRegularFile) {
  const Scratch scratch;
  write(scratch / "sample", recording());
  fs::remove(scratch / "sample" / kLast);
  ASSERT_EQ(::mkfifo((scratch / "sample" / kLast).c_str(), 0600), 0);
  expect_import_refused(scratch / "sample", {kLast + ": is not a regular file"});
  fs::remove(scratch / "sample" / kLast);
  fs::create_directory(scratch / "sample" / kLast);
  expect_import_refused(scratch / "sample", {kLast + ": is not a regular file"});
  fs::remove(scratch / "sample" / kLast);
  fs::create_symlink("nowhere", scratch / "sample" / kLast);
  expect_import_refused(scratch / "sample", {kLast + ": missing"});
}

TEST(KvpRefuses, TensorsThatAreMissingOrMisspelt) {
  Tensors tensors = tensors_of(1, 1);
  tensors["V"] = tensors["v"];
  expect_import_refused(with_last(safetensors(tensors)), {": holds 'V', expected only q_group, k and v"});
  for (const char* name : {"q_group", "k", "v"}) {
    tensors = tensors_of(1, 1);
    tensors.erase(name);
    expect_import_refused(with_last(safetensors(tensors)), {std::string(":/") + name + ": missing"});
  }
}

TEST(KvpRefuses, ShapesAndTypesThatDisagree) {
  const std::string six = floats(counting(6, 0));
  expect_import_refused(with_last("k", {"F32", {2, 3}, six}), {":/k: found shape [2, 3], expected [3, 2]"});
  expect_import_refused(with_last("v", {"F32", {6}, six}), {":/v: found shape [6], expected [3, 2]"});
  expect_import_refused(with_last("q_group", {"F32", {1, 3, 2}, six}),
                        {":/q_group: found shape [1, 3, 2], expected [3, 3, 2]"});
  expect_import_refused(with_last("k", {"F16", {3, 2}, std::string(12, '\0')}),
                        {":/k: found float16, expected float32"});
  const std::string nothing = safetensors(
      {{"q_group", {"F32", {1, 0, 2}, ""}}, {"k", {"F32", {0, 2}, ""}}, {"v", {"F32", {0, 2}, ""}}});
  expect_import_refused(Recording{{path_of("000000", "000"), nothing}},
                        {":/q_group: found shape [1, 0, 2], expected [group, tokens, head_dim]"});
}

TEST(KvpRefuses, TypesItDoesNotTake) {
  expect_import_refused(with_last("k", {"F64", {3, 2}, std::string(48, '\0')}),
                        {":/'k': found dtype 'F64', expected F32, F16 or BF16"});
  expect_import_refused(with_last("k", {"f32", {3, 2}, std::string(24, '\0')}), {"found dtype 'f32'"});
}

TEST(KvpRefuses, TruncatedFiles) {
  const std::string whole = safetensors(tensors_of(1, 1));
  const std::size_t header_end = whole.size() - 120;  // 18 + 6 + 6 numbers of 4 bytes
  expect_import_refused(with_last(""), {": cannot be read"});
  expect_import_refused(with_last(whole.substr(0, 7)), {": cannot be read"});
  expect_import_refused(with_last(whole.substr(0, header_end - 1)), {": declares a header of", "truncated"});
  expect_import_refused(with_last(whole.substr(0, header_end)),
                        {": holds 0 bytes of tensors, expected 120", "truncated"});
  expect_import_refused(with_last(whole.substr(0, whole.size() - 1)),
                        {": holds 119 bytes of tensors, expected 120"});
  expect_import_refused(with_last(whole + '\0'), {": holds 121 bytes of tensors, expected 120"});
}

TEST(KvpRefuses, HeaderLengthsThatAreOnlyDeclared) {
  expect_import_refused(with_last(little(UINT64_MAX, 8) + "{}"),
                        {": declares a header of 18446744073709551615 bytes, expected at most 2"});
  const std::string long_header = "{" + std::string(1 << 20, ' ') + "}";
  expect_import_refused(with_last(with_header(long_header, "")),
                        {": declares a header of 1048578 bytes, expected at most 1048576"});
}

TEST(KvpRefuses, HeadersThatAreNoJson) {
  const auto header = [](const std::string& text) { return with_last(with_header(text, "")); };
  expect_import_refused(header(""), {"no JSON object"});
  expect_import_refused(header("[]"), {"no JSON object"});
  expect_import_refused(header("\xEF\xBB\xBF{}"), {"no JSON object"});
  expect_import_refused(header(std::string("{}\0x", 4)), {"no JSON object"});
  expect_import_refused(header("{"), {"is no JSON (byte"});
  expect_import_refused(header("{} {}"), {"is no JSON (byte"});
  expect_import_refused(header(R"({"a\xzz":1})"), {"is no JSON (byte"});
  expect_import_refused(header("{\"\xFF\":{}}"), {"is no JSON (byte 3"});  // not UTF-8
  expect_import_refused(header("{}"), {":/k: missing"});
}

TEST(KvpRefuses, HeadersThatNestOrHoldOtherThings) {
  const auto damaged = [](const std::string& text) {
    expect_import_refused(with_last(with_header(text, "")), {"its header is damaged"});
  };
  for (const char* value : {"1",
                            "null",
                            "true",
                            "\"F32\"",
                            "[]",
                            "{}",
                            R"({"dtype":"F32"})",
                            R"({"dtype":1})",
                            R"({"dtype":null})",
                            R"({"dtype":{}})",
                            R"({"shape":[[]]})",
                            R"({"shape":[-1]})",
                            R"({"shape":[1.5]})",
                            R"({"shape":["1"]})",
                            R"({"shape":[9223372036854775808]})",
                            R"({"shape":[18446744073709551616]})",
                            R"({"shape":"3"})",
                            R"({"more":[]})",
                            R"({"dtype":"F32","shape":[0],"data_offsets":[0]})",
                            R"({"dtype":"F32","shape":[0],"data_offsets":[0,0,0]})",
                            R"({"dtype":"F32","shape":[0],"data_offsets":[0,0],"more":"x"})"}) {
    SCOPED_TRACE(value);
    damaged(std::string(R"({"k":)") + value + "}");
  }
  damaged(R"({"__metadata__":{"a":1}})");
  damaged(R"({"__metadata__":{"a":{}}})");
  damaged(R"({"__metadata__":[]})");
  // Half a million levels end at the first that is too deep, and never on the stack.
  damaged(R"({"k":{"shape":)" + std::string(500000, '['));
  damaged([] {
    std::string nested;
    for (int level = 0; level < 100000; ++level) {
      nested += R"({"a":)";
    }
    return nested;
  }());
}

TEST(KvpRefuses, KeysThatAreThereTwice) {
  const Tensors tensors = tensors_of(1, 1);
  const std::string k = field("k", tensors.at("k"), 0);
  expect_import_refused(with_last(with_header("{" + k + "," + k + "}", tensors.at("k").data)),
                        {"its header names 'k' twice"});
  expect_import_refused(with_last(with_header(R"({"k":{"shape":[],"shape":[]}})", "")),
                        {"its header names 'shape' twice"});
  expect_import_refused(with_last(with_header(R"({"__metadata__":{},"__metadata__":{}})", "")),
                        {"its header names '__metadata__' twice"});
}

TEST(KvpRefuses, OffsetsThatDoNotFitShapeOrFile) {
  const auto offsets = [](const std::string& k, const std::string& v) {
    const std::string header = R"({"k":{"dtype":"F32","shape":[3,2],"data_offsets":)" + k +
                               R"(},"v":{"dtype":"F32","shape":[3,2],"data_offsets":)" + v + "}}";
    return with_last(with_header(header, std::string(48, '\0')));
  };
  expect_import_refused(offsets("[0,24]", "[24,48]"), {":/q_group: missing"});  // nothing wrong with them
  expect_import_refused(offsets("[0,20]", "[24,48]"),
                        {":/'k': its shape [3, 2] of float32 does not fit its bytes [0, 20)"});
  expect_import_refused(offsets("[24,0]", "[24,48]"), {":/'k': its shape", "[24, 0)"});
  expect_import_refused(offsets("[0,24]", "[20,44]"), {":/'v': its bytes begin at 20, expected 24"});
  expect_import_refused(offsets("[0,24]", "[0,24]"), {":/'v': its bytes begin at 0, expected 24"});
  expect_import_refused(offsets("[0,24]", "[28,52]"), {":/'v': its bytes begin at 28, expected 24"});
  expect_import_refused(offsets("[4,28]", "[28,52]"), {":/'k': its bytes begin at 4, expected 0"});
  expect_import_refused(offsets("[9223372036854775783,9223372036854775807]", "[0,24]"),
                        {":/'k': its bytes begin at 9223372036854775783, expected 24"});
  const std::string overflow =
      R"({"k":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})";
  expect_import_refused(with_last(with_header(overflow, "")), {":/'k': its shape", "does not fit"});
}

TEST(KvpRefuses, NumbersThatAreNotFiniteNamingThePlace) {
  std::vector<float> q = counting(18, 0);
  q[11] = std::numeric_limits<float>::infinity();  // query head 1 of the group, token 2, dimension 1
  expect_import_refused(with_last("q_group", {"F32", {3, 3, 2}, floats(q)}),
                        {kLast + ":/q_group[1, 2, 1]: found a NaN or infinity"});
  std::vector<float> v = counting(6, 0);
  v[4] = std::numeric_limits<float>::quiet_NaN();
  expect_import_refused(with_last("v", {"F32", {3, 2}, floats(v)}), {kLast + ":/v[2, 0]: found a NaN"});
}

TEST(KvpRefuses, OptionsThatDoNotFitTheRecording) {
  expect_rejected(of_prompt(0), "prompt is 0, expected 1 .. 3");
  expect_rejected(of_prompt(4), "prompt is 4, expected 1 .. 3");
  expect_rejected(of_prompt(2, {{2, 4}}), "image 2:4 is no span of the 3 tokens");
  KvpOptions options = of_prompt(2);
  options.scale = std::numeric_limits<double>::quiet_NaN();
  expect_rejected(options, "scale is not finite");
  options = of_prompt(2);
  options.window = -1;
  expect_rejected(options, "window is -1");
}

}  // namespace
}  // namespace hae::traces::test
