#include <fcntl.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <functional>

#include "tests/traces/fixtures.hpp"

namespace hae::traces::test {
namespace {

/// A sound trace, spoilt by `spoil`, is refused with these words.
void expect_spoilt(const SequenceInfo& info, const std::function<void(RawFile&)>& spoil,
                   const std::vector<std::string>& words) {
  const Scratch scratch;
  write_small(scratch / "trace.h5", info);
  {
    RawFile raw(scratch / "trace.h5");
    spoil(raw);
  }
  expect_refused(scratch / "trace.h5", words);
}

/// Fails when somebody opens the file while this lives.
class OpenWatch {
 public:
  explicit OpenWatch(const std::filesystem::path& path) : descriptor_(::inotify_init1(IN_NONBLOCK)) {
    EXPECT_GE(::inotify_add_watch(descriptor_, path.c_str(), IN_OPEN | IN_ACCESS), 0);
  }
  ~OpenWatch() { ::close(descriptor_); }
  [[nodiscard]] bool was_opened() const {
    std::array<char, 4096> events;
    return ::read(descriptor_, events.data(), events.size()) > 0;
  }

 private:
  int descriptor_;
};

// ---- the file itself

TEST(Refuses, AFileThatIsMissing) {
  const Scratch scratch;
  expect_refused(scratch / "none.h5", {"No such file", "check the path"});
}

TEST(Refuses, AnEmptyFile) {
  const Scratch scratch;
  write_bytes(scratch / "trace.h5", "");
  expect_refused(scratch / "trace.h5", {"is empty"});
}

TEST(Refuses, ADirectory) {
  const Scratch scratch;
  std::filesystem::create_directory(scratch / "trace.h5");
  expect_refused(scratch / "trace.h5", {"is a directory"});
}

TEST(Refuses, ANamedPipeWithoutWaitingForItsWriter) {
  const Scratch scratch;
  ASSERT_EQ(::mkfifo((scratch / "trace.h5").c_str(), 0600), 0);
  expect_refused(scratch / "trace.h5", {"not a regular file"});
}

TEST(Refuses, WhatIsNotHdf5) {
  const Scratch scratch;
  write_bytes(scratch / "trace.h5", std::string(3000, 'x'));
  expect_refused(scratch / "trace.h5", {"not an HDF5 file"});
}

TEST(Refuses, Hdf5ThatIsNotATrace) {
  const Scratch scratch;
  H5Fclose(H5Fcreate((scratch / "trace.h5").c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT));
  expect_refused(scratch / "trace.h5", {"not a trace", "format"});
}

TEST(Refuses, EveryTruncation) {
  const Scratch scratch;
  write_small(scratch / "whole.h5", small_qkv());
  const std::string whole = read_bytes(scratch / "whole.h5");
  ASSERT_GT(whole.size(), 2048u);
  for (std::size_t size = 96; size < whole.size();
       size += 61) {  // 96: the whole superblock and nothing after it
    write_bytes(scratch / "trace.h5", std::string_view(whole).substr(0, size));
    expect_refused(scratch / "trace.h5", {"truncated", "record it again"});
  }
  for (const std::size_t size : {std::size_t{1}, std::size_t{7}, std::size_t{8}, std::size_t{50}}) {
    write_bytes(scratch / "trace.h5", std::string_view(whole).substr(0, size));
    EXPECT_TRUE(refusal(scratch / "trace.h5").has_value()) << size;
  }
}

TEST(Refuses, AFileWhoseWriterDidNotCloseIt) {
  const Scratch scratch;
  {
    // The newest format writes into its superblock that it is open; a killed writer never takes that back.
    const hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110);
    const hid_t file = H5Fcreate((scratch / "open.h5").c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access);
    H5Fflush(file, H5F_SCOPE_GLOBAL);
    write_bytes(scratch / "trace.h5", read_bytes(scratch / "open.h5"));
    H5Fclose(file);
    H5Pclose(access);
  }
  expect_refused(scratch / "trace.h5", {"marked as open for writing", "record it again"});
}

TEST(Refuses, ASuperblockFromTheFuture) {
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv());
  std::string bytes = read_bytes(scratch / "trace.h5");
  bytes[8] = 9;
  write_bytes(scratch / "trace.h5", bytes);
  expect_refused(scratch / "trace.h5", {"superblock version 9", "1.10"});
}

TEST(Refuses, AnUnfinishedTrace) {
  expect_spoilt(small_qkv(), [](RawFile& raw) { raw.remove_attribute("/", "complete"); },
                {"unfinished", "complete"});
  expect_spoilt(small_qkv(), [](RawFile& raw) { raw.set_attribute("/", "complete", 0); },
                {"unfinished", "complete"});
}

TEST(Refuses, ANewerVersion) {
  expect_spoilt(small_qkv(), [](RawFile& raw) { raw.set_attribute("/", "version", 2); },
                {"version 2", "expected 1", "newer hae"});
}

TEST(Refuses, AFileLockedByItsWriterUnlessToldNotToLock) {
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv());
  const int writer = ::open((scratch / "trace.h5").c_str(), O_RDWR);
  ASSERT_EQ(::flock(writer, LOCK_EX), 0);
  expect_refused(scratch / "trace.h5", {"locked by another process", "errno 11", "--no-lock"});
  EXPECT_EQ(refusal(scratch / "trace.h5", {.lock = false}), std::nullopt);
  ::close(writer);
  EXPECT_EQ(refusal(scratch / "trace.h5"), std::nullopt);
}

TEST(Refuses, AWriterOfAFileThatIsBeingWritten) {
  const Scratch scratch;
  TraceWriter first(scratch / "trace.h5", {});
  EXPECT_THROW(TraceWriter(scratch / "trace.h5", {}), OutputError);
  write_exact(first, small_qkv(), FloatType::float32);
  first.finish();
  EXPECT_EQ(refusal(scratch / "trace.h5"), std::nullopt);
}

TEST(TraceFile, LetsManyReadersIn) {
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv());
  TraceFile first(scratch / "trace.h5");
  EXPECT_EQ(refusal(scratch / "trace.h5"), std::nullopt);
}

TEST(TraceFile, KeepsTheErrorHandlerOfItsHost) {
  H5E_auto2_t before = nullptr;
  H5E_auto2_t after = nullptr;
  void* data = nullptr;
  H5Eget_auto2(H5E_DEFAULT, &before, &data);
  const Scratch scratch;
  EXPECT_TRUE(refusal(scratch / "none.h5").has_value());
  write_small(scratch / "trace.h5", small_qkv());
  EXPECT_FALSE(refusal(scratch / "trace.h5").has_value());
  H5Eget_auto2(H5E_DEFAULT, &after, &data);
  EXPECT_EQ(before, after);
  EXPECT_NE(before, nullptr);
}

// ---- what the metadata says

struct Contradiction {
  const char* attribute;
  Index value;
  std::vector<std::string> words;
};

TEST(Refuses, AttributesThatContradictThemselves) {
  const std::vector<Contradiction> cases{
      {"kv_heads", 3, {"4 query heads do not divide by 3 KV heads"}},
      {"kv_heads", 8, {"kv_heads is 8"}},
      {"query_heads", 0, {"query_heads is 0"}},
      {"query_heads",
       6,
       {"q: found shape [4, 6, 4]", "expected [query_heads, tokens, head_dim] = [6, 6, 4]"}},
      {"layers", 3, {"found 2 layers, expected layers = 3"}},
      {"layers", 1, {"layers"}},
      {"layers", Index{1} << 60, {"layers is"}},
      {"prompt", 7, {"prompt is 7, expected 1 .. 6"}},
      {"prompt", 0, {"prompt is 0"}},
      {"tokens", 5, {"modality: found shape [6], expected [tokens] = [5]"}},
      {"tokens", -1, {"tokens is -1"}},
      {"head_dim", 5, {"q: found shape [4, 6, 4]", "[4, 6, 5]"}},
      {"element_bytes", 0, {"element_bytes is 0"}},
      {"element_bytes", 3, {"element_bytes is 3, expected 1, 2, 4 or 8"}},
      {"generated", -1, {"generated is -1"}},
  };
  for (const Contradiction& c : cases) {
    expect_spoilt(
        small_qkv(), [&](RawFile& raw) { raw.set_attribute(kSequence, c.attribute, c.value); }, c.words);
  }
}

TEST(Refuses, AttributesThatAreMissingOrOfAnotherType) {
  for (const char* name : {"name", "payload", "layers", "query_heads", "kv_heads", "head_dim", "tokens",
                           "prompt", "generated", "scale"}) {
    expect_spoilt(small_qkv(), [&](RawFile& raw) { raw.remove_attribute(kSequence, name); },
                  {kSequence, std::string("'") + name + "' is missing"});
  }
  expect_spoilt(small_qkv(), [](RawFile& raw) { raw.set_attribute(kSequence, "layers", "two"); },
                {"'layers' is not an integer"});
  expect_spoilt(small_qkv(), [](RawFile& raw) { raw.set_attribute(kSequence, "name", 5); },
                {"'name' is not a string"});
  expect_spoilt(small_qkv(), [](RawFile& raw) { raw.set_attribute(kSequence, "scale", "big"); },
                {"'scale' is not a float64"});
  expect_spoilt(small_qkv(), [](RawFile& raw) { raw.set_attribute(kSequence, "payload", "scores"); },
                {"payload is 'scores'"});
}

TEST(Refuses, ImagesAndModalityThatDisagree) {
  const auto replace = [](const char* name, std::vector<Index> values) {
    return [name, values](RawFile& raw) {
      raw.replace(kSequence + "/" + name, H5T_NATIVE_INT64, {values.size()}, values.data());
    };
  };
  expect_spoilt(small_qkv(), replace("image", {-1, 0, 0, 5, -1, -1}), {"/image[3]: found 5, expected -1"});
  expect_spoilt(small_qkv(), replace("image", {-1, 0, -1, -1, -1, -1}), {"/image[2]: found -1"});
  expect_spoilt(small_qkv(), replace("image", {-2, 0, 0, -1, -1, -1}), {"/image[0]: found -2"});
  expect_spoilt(small_qkv(), replace("modality", {0, 1, 2, 0, 0, 0}),
                {"/modality[2]: found 2, expected 0 (text) or 1"});
  expect_spoilt(small_qkv(), replace("modality", {0, 1, 1, 0, 0}), {"/modality: found shape [5]"});
  expect_spoilt(small_qkv(), [](RawFile& raw) { raw.remove(kSequence + "/image"); }, {"/image: missing"});
}

TEST(Refuses, MasksAndRowsOutOfRange) {
  const auto replace = [](const char* name, std::vector<Index> values) {
    return [name, values](RawFile& raw) {
      raw.replace(kSequence + "/" + name, H5T_NATIVE_INT64, {values.size()}, values.data());
    };
  };
  expect_spoilt(small_qkv(), replace("window", {0, -1}), {"/window[1]: found -1"});
  expect_spoilt(small_qkv(), replace("window", {0, 0, 0}),
                {"/window: found shape [3], expected [layers] = [2]"});
  expect_spoilt(small_qkv(), replace("bidirectional", {3, 0}),
                {"/bidirectional[0]: found 3, expected 0 .. 2"});
  expect_spoilt(small_attention(), replace("prompt_rows", {0, 2, 2, 3}), {"prompt_rows[2] is 2"});
  expect_spoilt(small_attention(), replace("prompt_rows", {0, 1, 2, 4}), {"prompt_rows[3] is 4"});
  expect_spoilt(small_attention(), replace("prompt_rows", {0, 1, 2}),
                {"/prompt: found shape [4, 4, 4]", "[4, 3, 4]"});
}

TEST(Refuses, OptionalDatasetsOfAnotherShape) {
  const std::vector<Index> values(20, 0);
  for (const char* name : {"frame", "patch", "position", "token_id"}) {
    expect_spoilt(
        small_qkv(),
        [&](RawFile& raw) { raw.replace(kSequence + "/" + name, H5T_NATIVE_INT64, {5}, values.data()); },
        {std::string("/") + name + ": found shape [5]"});
  }
  expect_spoilt(
      small_qkv(),
      [&](RawFile& raw) { raw.replace(kSequence + "/token", H5T_NATIVE_INT64, {6}, values.data()); },
      {"/token: found int64, expected fixed-length strings"});
  const std::vector<float> reals(20, 0);
  expect_spoilt(small_qkv(),
                [&](RawFile& raw) {
                  raw.replace(kSequence + "/embedding_similarity", H5T_NATIVE_FLOAT, {1, 2}, reals.data());
                },
                {"found shape [1, 2]", "[visual prompt tokens, text prompt tokens] = [2, 2]"});
}

TEST(Refuses, QueriesBeforeRotationWithoutTheRotation) {
  const std::vector<float> q(4 * 6 * 4, 0);
  const auto add = [&](RawFile& raw) {
    for (const char* layer : {"/layers/000000", "/layers/000001"}) {
      raw.replace(kSequence + layer + "/q_unrotated", H5T_NATIVE_FLOAT, {4, 6, 4}, q.data());
    }
  };
  expect_spoilt(small_qkv(), add, {"/rotary: missing"});
  expect_spoilt(small_qkv(),
                [&](RawFile& raw) {
                  raw.replace(kLayer + "/q_unrotated", H5T_NATIVE_FLOAT, {4, 6, 4}, q.data());
                },
                {"q_unrotated", "some layers carry it and others do not"});
}

TEST(Refuses, LayersThatDiffer) {
  const std::vector<float> k(2 * 6 * 4, 0);
  for (const char* name : {"/q", "/k", "/v"}) {
    expect_spoilt(small_qkv(), [&](RawFile& raw) { raw.remove(kSequence + "/layers/000001" + name); },
                  {std::string("/layers/000001") + name + ": missing"});
  }
  expect_spoilt(small_qkv(), [](RawFile& raw) { raw.remove(kSequence + "/layers/000001"); },
                {"found 1 layers"});
  expect_spoilt(small_attention(),
                [&](RawFile& raw) {
                  raw.replace(kLayer + "/v", H5T_NATIVE_FLOAT, {2, 6, 4}, k.data());
                },
                {"/v", "expected all or none"});
}

TEST(Refuses, SequencesWithGapsOrOneName) {
  const Scratch scratch;
  const auto write_two = [&] {
    TraceWriter writer(scratch / "trace.h5", {});
    write_exact(writer, small_qkv("one"), FloatType::float32);
    write_exact(writer, small_qkv("two"), FloatType::float32);
    writer.finish();
  };
  write_two();
  {
    RawFile raw(scratch / "trace.h5");
    H5Lmove(raw.id(), "/sequences/000001", raw.id(), "/sequences/000002", H5P_DEFAULT, H5P_DEFAULT);
  }
  expect_refused(scratch / "trace.h5", {"2 members but no 000001", "without gaps"});
  write_two();
  RawFile(scratch / "trace.h5").set_attribute("/sequences/000001", "name", "one");
  expect_refused(scratch / "trace.h5", {"'one'", "unique"});
  write_two();
  {
    RawFile raw(scratch / "trace.h5");
    raw.remove("/sequences/000000");
    raw.remove("/sequences/000001");
  }
  expect_refused(scratch / "trace.h5", {"found 0 sequences"});
}

// ---- types

hid_t float16_like(std::size_t bias, bool bfloat16) {
  const hid_t type = H5Tcopy(H5T_IEEE_F32LE);
  if (bfloat16) {
    H5Tset_fields(type, 15, 7, 8, 0, 7);
  } else {
    H5Tset_fields(type, 15, 10, 5, 0, 10);
  }
  H5Tset_size(type, 2);
  H5Tset_ebias(type, bias);
  return type;
}

TEST(Refuses, A16BitFloatItDoesNotKnow) {
  const std::vector<std::uint16_t> codes(4 * 6 * 4, 0x3F80);
  const hid_t type = float16_like(15, true);  // bfloat16's fields with half's bias
  expect_spoilt(small_qkv(),
                [&](RawFile& raw) {
                  raw.replace(kLayer + "/q", type, {4, 6, 4}, codes.data());
                },
                {"/q", "unknown 16-bit float type", "bias 15", "expected float32, float16 or bfloat16"});
  H5Tclose(type);
}

TEST(Refuses, OtherTypesOfPayload) {
  const std::vector<double> reals(4 * 6 * 4, 0);
  const std::vector<Index> integers(4 * 6 * 4, 0);
  expect_spoilt(small_qkv(),
                [&](RawFile& raw) {
                  raw.replace(kLayer + "/q", H5T_IEEE_F64LE, {4, 6, 4}, reals.data());
                },
                {"/q: found float64"});
  expect_spoilt(small_qkv(),
                [&](RawFile& raw) {
                  raw.replace(kLayer + "/q", H5T_NATIVE_INT64, {4, 6, 4}, integers.data());
                },
                {"/q: found int64"});
  expect_spoilt(small_qkv(),
                [&](RawFile& raw) { raw.replace(kSequence + "/image", H5T_IEEE_F64LE, {6}, reals.data()); },
                {"/image: found float64, expected integers"});
  const std::vector<std::uint16_t> halves(4 * 6 * 4, 0);
  const hid_t half = float16_like(15, false);
  expect_spoilt(small_qkv(),
                [&](RawFile& raw) {
                  raw.replace(kSequence + "/layers/000001/q", half, {4, 6, 4}, halves.data());
                },
                {"/layers/000001/q: found float16, expected float32 as in layer 000000"});
  H5Tclose(half);
}

// ---- hostile files

TEST(Refuses, ExternalStorageWithoutOpeningTheOtherFile) {
  const Scratch scratch;
  write_bytes(scratch / "secret.txt", std::string(1000, 's'));
  write_small(scratch / "trace.h5", small_qkv());
  {
    const hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_external(properties, (scratch / "secret.txt").c_str(), 0, 4 * 6 * 4 * 4);
    RawFile(scratch / "trace.h5").replace(kLayer + "/q", H5T_IEEE_F32LE, {4, 6, 4}, nullptr, properties);
    H5Pclose(properties);
  }
  const OpenWatch watch(scratch / "secret.txt");
  expect_refused(scratch / "trace.h5", {"/q: found external storage"});
  EXPECT_FALSE(watch.was_opened());
}

TEST(Refuses, AnExternalLinkInAnyPartOfAPathWithoutOpeningTheOtherFile) {
  for (const std::string& part :
       {std::string("/sequences"), kSequence, kSequence + "/layers", kLayer, kLayer + "/q"}) {
    const Scratch scratch;
    write_small(scratch / "trace.h5", small_qkv());
    write_small(scratch / "other.h5", small_qkv());
    {
      RawFile raw(scratch / "trace.h5");
      raw.remove(part);
      H5Lcreate_external((scratch / "other.h5").c_str(), part.c_str(), raw.id(), part.c_str(), H5P_DEFAULT,
                         H5P_DEFAULT);
    }
    const OpenWatch watch(scratch / "other.h5");
    expect_refused(scratch / "trace.h5", {part + ": found an external link"});
    EXPECT_FALSE(watch.was_opened());
  }
}

TEST(Refuses, ASoftLink) {
  expect_spoilt(small_qkv(),
                [](RawFile& raw) {
                  raw.remove(kLayer + "/k");
                  H5Lcreate_soft((kLayer + "/v").c_str(), raw.id(), (kLayer + "/k").c_str(), H5P_DEFAULT,
                                 H5P_DEFAULT);
                },
                {"/k: found a soft link"});
}

TEST(TraceFile, AcceptsAHardLinkInTheFile) {
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv());
  {
    RawFile raw(scratch / "trace.h5");
    raw.remove(kLayer + "/k");
    H5Lcreate_hard(raw.id(), (kLayer + "/v").c_str(), raw.id(), (kLayer + "/k").c_str(), H5P_DEFAULT,
                   H5P_DEFAULT);
  }
  EXPECT_EQ(refusal(scratch / "trace.h5"), std::nullopt);
}

TEST(Refuses, AVirtualDatasetWithoutOpeningItsSource) {
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv());
  write_small(scratch / "other.h5", small_qkv());
  {
    const std::array<hsize_t, 3> shape{4, 6, 4};
    const hid_t space = H5Screate_simple(3, shape.data(), nullptr);
    const hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_virtual(properties, space, (scratch / "other.h5").c_str(), (kLayer + "/q").c_str(), space);
    RawFile(scratch / "trace.h5").replace(kLayer + "/q", H5T_IEEE_F32LE, {4, 6, 4}, nullptr, properties);
    H5Pclose(properties);
    H5Sclose(space);
  }
  const OpenWatch watch(scratch / "other.h5");
  expect_refused(scratch / "trace.h5", {"/q: found a virtual dataset"});
  EXPECT_FALSE(watch.was_opened());
}

TEST(Refuses, DeclaredSizeWithoutStoredBytes) {
  expect_spoilt(small_qkv(),
                [](RawFile& raw) {
                  raw.replace(kLayer + "/q", H5T_IEEE_F32LE, {4, 6, 4});
                },
                {"/q: declares 384 bytes but none were ever written"});
  const hid_t chunked = H5Pcreate(H5P_DATASET_CREATE);
  const std::array<hsize_t, 3> chunk{1, 1, 1024};
  H5Pset_chunk(chunked, 3, chunk.data());
  // 1 head of 2^20 tokens and 2^20 dimensions: 4 TiB, 2^30 chunks, none stored.
  expect_spoilt(small_qkv(),
                [&](RawFile& raw) {
                  raw.replace(kLayer + "/q", H5T_IEEE_F32LE, {1, 1 << 20, 1 << 20}, nullptr, chunked);
                },
                {"/q: 0 of its 1073741824 chunks are stored"});
  H5Pclose(chunked);
}

TEST(Refuses, MoreElementsThan64BitsCount) {
  const hid_t chunked = H5Pcreate(H5P_DATASET_CREATE);
  const std::array<hsize_t, 3> chunk{1, 1, 1};
  H5Pset_chunk(chunked, 3, chunk.data());
  const std::array<hsize_t, 3> shape{hsize_t{1} << 31, hsize_t{1} << 31, 2};
  expect_spoilt(
      small_qkv(),
      [&](RawFile& raw) {
        raw.replace(kLayer + "/q", H5T_IEEE_F32LE, {shape[0], shape[1], shape[2]}, nullptr, chunked);
      },
      {"/q", "more than 2^63"});
  H5Pclose(chunked);
}

TEST(Refuses, OneMissingChunk) {
  const hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
  const std::array<hsize_t, 3> chunk{1, 6, 4};
  H5Pset_chunk(properties, 3, chunk.data());
  expect_spoilt(small_qkv(),
                [&](RawFile& raw) {
                  raw.replace(kLayer + "/q", H5T_IEEE_F32LE, {4, 6, 4}, nullptr, properties);
                  // The first of four chunks is written, three are not.
                  const hid_t dataset = H5Dopen2(raw.id(), (kLayer + "/q").c_str(), H5P_DEFAULT);
                  const hid_t space = H5Dget_space(dataset);
                  const std::array<hsize_t, 3> start{};
                  H5Sselect_hyperslab(space, H5S_SELECT_SET, start.data(), nullptr, chunk.data(), nullptr);
                  const hsize_t size = 24;
                  const hid_t memory = H5Screate_simple(1, &size, nullptr);
                  const std::vector<float> values(24, 1);
                  H5Dwrite(dataset, H5T_NATIVE_FLOAT, memory, space, H5P_DEFAULT, values.data());
                  H5Sclose(memory);
                  H5Sclose(space);
                  H5Dclose(dataset);
                },
                {"/q: 1 of its 4 chunks are stored"});
  H5Pclose(properties);
}

TEST(Refuses, AFilterItDoesNotKnow) {
  const hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
  const std::array<hsize_t, 3> chunk{4, 6, 4};
  H5Pset_chunk(properties, 3, chunk.data());
  H5Pset_filter(properties, 32015, H5Z_FLAG_OPTIONAL, 0, nullptr);  // zstandard's number; no plugin is there
  const std::vector<float> values(96, 1);
  expect_spoilt(small_qkv(),
                [&](RawFile& raw) {
                  raw.replace(kLayer + "/q", H5T_IEEE_F32LE, {4, 6, 4}, values.data(), properties);
                },
                {"/q: found filter 32015"});
  H5Pclose(properties);
}

TEST(Refuses, WrongRanksAndNoElementsAtAll) {
  const std::vector<float> values(96, 1);
  expect_spoilt(small_qkv(),
                [&](RawFile& raw) {
                  raw.replace(kLayer + "/q", H5T_IEEE_F32LE, {1, 1, 4, 6, 4}, values.data());
                },
                {"/q: found shape [1, 1, 4, 6, 4]"});
  expect_spoilt(small_qkv(),
                [&](RawFile& raw) { raw.replace(kLayer + "/q", H5T_IEEE_F32LE, {96}, values.data()); },
                {"/q: found shape [96]"});
  expect_spoilt(small_qkv(),
                [](RawFile& raw) {
                  raw.remove(kLayer + "/q");
                  const hid_t space = H5Screate(H5S_NULL);
                  H5Dclose(H5Dcreate2(raw.id(), (kLayer + "/q").c_str(), H5T_IEEE_F32LE, space, H5P_DEFAULT,
                                      H5P_DEFAULT, H5P_DEFAULT));
                  H5Sclose(space);
                },
                {"/q", "null dataspace"});
}

TEST(Refuses, AGroupWhereADatasetBelongsAndTheReverse) {
  expect_spoilt(
      small_qkv(),
      [](RawFile& raw) {
        raw.remove(kLayer + "/q");
        H5Gclose(H5Gcreate2(raw.id(), (kLayer + "/q").c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
      },
      {"/q: found a group, expected a dataset"});
  const std::vector<float> values(2, 1);
  expect_spoilt(small_qkv(),
                [&](RawFile& raw) { raw.replace(kSequence + "/layers", H5T_IEEE_F32LE, {2}, values.data()); },
                {"/layers: found a dataset, expected a group"});
}

TEST(Refuses, AContiguousDatasetThatReachesBeyondTheFile) {
  const Scratch scratch;
  SequenceInfo info = small_qkv();
  info.head_dim = 256;
  write_small(scratch / "trace.h5", info);
  haddr_t offset = 0;
  {
    const RawFile raw(scratch / "trace.h5");
    const hid_t dataset = H5Dopen2(raw.id(), (kLayer + "/q").c_str(), H5P_DEFAULT);
    offset = H5Dget_offset(dataset);
    H5Dclose(dataset);
  }
  // The address of q's data stands in its object header, little-endian: point it behind the end of the file.
  std::string bytes = read_bytes(scratch / "trace.h5");
  const std::string address(reinterpret_cast<const char*>(&offset), sizeof offset);
  const haddr_t far = bytes.size() - 8;
  const std::size_t place = bytes.find(address);
  ASSERT_NE(place, std::string::npos);
  bytes.replace(place, sizeof far, reinterpret_cast<const char*>(&far), sizeof far);
  write_bytes(scratch / "trace.h5", bytes);
  expect_refused(scratch / "trace.h5", {"/q: declares 24576 bytes, more than the file holds there"});
}

TEST(Refuses, NamesOfTheFileInOneLine) {
  expect_spoilt(small_qkv(), [](RawFile& raw) { raw.set_attribute(kSequence, "payload", "a\nb\x1B[31m"); },
                {"payload is 'a?b?[31m'"});
}

}  // namespace
}  // namespace hae::traces::test
