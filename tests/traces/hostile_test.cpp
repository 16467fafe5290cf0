#include <sys/resource.h>
#include <unistd.h>
#include <zlib.h>

#include <array>
#include <cstdlib>
#include <functional>
#include <set>

#include "tests/traces/fixtures.hpp"
#include "traces/isolated.hpp"
#include "traces/run_file.hpp"

// Well-formed HDF5 that means harm, each beside a twin that means none.

namespace hae::traces::test {
namespace {

using Change = std::function<void(RawFile&)>;

/// What `change` makes of a sound trace is refused with these words.
void expect_changed_refused(const Change& change, const std::vector<std::string>& words) {
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv());
  {
    RawFile raw(scratch / "trace.h5");
    change(raw);
  }
  expect_refused(scratch / "trace.h5", words);
}

void expect_changed_accepted(const Change& change) {
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv());
  {
    RawFile raw(scratch / "trace.h5");
    change(raw);
  }
  EXPECT_EQ(refusal(scratch / "trace.h5"), std::nullopt);
}

/// The message of the TraceError that reading every query of layer 0 throws.
std::optional<std::string> reading_refusal(const std::filesystem::path& path) {
  TraceFile trace(path);
  const auto sequence = trace.open(0);
  const SequenceInfo& info = sequence->info();
  const auto layer = sequence->layer(0);
  std::vector<float> values(static_cast<std::size_t>(info.query_heads * info.tokens * *info.head_dim));
  try {
    layer->read_queries({0, info.tokens}, {values.data(), {info.query_heads, info.tokens, *info.head_dim}});
  } catch (const TraceError& error) {
    return error.what();
  }
  return std::nullopt;
}

// ---- links

const std::vector<std::string>& parts() {
  static const std::vector<std::string> all{"/sequences",          kSequence,
                                            kSequence + "/layers", kLayer,
                                            kLayer + "/q",         kSequence + "/modality",
                                            kSequence + "/image",  kSequence + "/window"};
  return all;
}

TEST(Hostile, EverySoftLinkIsRefusedAndEveryHardLinkIsNot) {
  for (const std::string& part : parts()) {
    const auto link = [&](RawFile& raw, bool soft) {
      H5Lmove(raw.id(), part.c_str(), raw.id(), "/elsewhere", H5P_DEFAULT, H5P_DEFAULT);
      soft ? H5Lcreate_soft("/elsewhere", raw.id(), part.c_str(), H5P_DEFAULT, H5P_DEFAULT)
           : H5Lcreate_hard(raw.id(), "/elsewhere", raw.id(), part.c_str(), H5P_DEFAULT, H5P_DEFAULT);
    };
    expect_changed_refused([&](RawFile& raw) { link(raw, true); }, {part + ": found a soft link"});
    expect_changed_accepted([&](RawFile& raw) { link(raw, false); });
  }
}

TEST(Hostile, EveryUserDefinedLinkIsRefused) {
  H5L_class_t kind{};
  kind.version = H5L_LINK_CLASS_T_VERS;
  kind.id = static_cast<H5L_type_t>(H5L_TYPE_UD_MIN + 7);
  kind.trav_func = [](const char*, hid_t, const void*, std::size_t, hid_t, hid_t) -> hid_t { return -1; };
  ASSERT_GE(H5Lregister(&kind), 0);
  for (const std::string& part : parts()) {
    expect_changed_refused(
        [&](RawFile& raw) {
          raw.remove(part);
          H5Lcreate_ud(raw.id(), part.c_str(), kind.id, "x", 1, H5P_DEFAULT, H5P_DEFAULT);
        },
        {part + ": found a user-defined link"});
  }
  H5Lunregister(kind.id);
}

TEST(Hostile, CyclesOfHardLinksEndNowhere) {
  for (const std::string& part : {kSequence, kSequence + "/layers", kLayer}) {
    // The group is its own child; a name in it leads back to it.
    expect_changed_refused(
        [&](RawFile& raw) {
          raw.remove(part);
          H5Lcreate_hard(raw.id(), "/", raw.id(), part.c_str(), H5P_DEFAULT, H5P_DEFAULT);
        },
        {part});
  }
  expect_changed_accepted([](RawFile& raw) {
    H5Lcreate_hard(raw.id(), "/", raw.id(), (kSequence + "/root").c_str(), H5P_DEFAULT, H5P_DEFAULT);
  });
}

TEST(Hostile, NamedTypesAreNoObjectsOfATrace) {
  const auto commit = [](RawFile& raw, const std::string& path) {
    const hid_t type = H5Tcopy(H5T_IEEE_F32LE);
    H5Tcommit2(raw.id(), path.c_str(), type, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    return type;
  };
  for (const std::string& part : {kSequence + "/layers", kLayer, kLayer + "/q", kSequence + "/image"}) {
    expect_changed_refused(
        [&](RawFile& raw) {
          raw.remove(part);
          H5Tclose(commit(raw, part));
        },
        {part + ": found a named type"});
  }
  const std::vector<float> values(4 * 6 * 4, 1);
  expect_changed_accepted([&](RawFile& raw) {  // a dataset may be of a type that has a name
    const hid_t type = commit(raw, "/type");
    raw.replace(kLayer + "/q", type, {4, 6, 4}, values.data());
    H5Tclose(type);
  });
}

/// The files that a program opens, by a trace of its system calls.
std::set<std::string> files_opened(const std::filesystem::path& log, const std::string& command) {
  const std::string traced = "strace -f -qq -e trace=open,openat,openat2,creat,execve,readlink,stat -o " +
                             log.string() + " " + command + " >" + log.string() + ".out 2>&1";
  EXPECT_NE(std::system(traced.c_str()), -1);
  std::set<std::string> files;
  std::ifstream lines(log);
  std::string line;
  while (std::getline(lines, line)) {
    const std::size_t begin = line.find('"');
    if (begin != std::string::npos) {
      files.insert(line.substr(begin + 1, line.find('"', begin + 1) - begin - 1));
    }
  }
  return files;
}

TEST(Hostile, NothingOutsideTheTraceIsOpened) {
  const Scratch scratch;
  const std::string path = (scratch / "trace.h5").string();
  const std::string other = (scratch / "other.h5").string();
  if (std::system(("strace -qq -o " + path + " true 2>/dev/null").c_str()) != 0) {
    GTEST_SKIP() << "strace is missing or may not trace; script/install build installs it";
  }
  write_small(other, small_qkv());
  const auto opened_after = [&](const Change& change, const std::string& command) {
    write_small(path, small_qkv());
    change(*std::make_unique<RawFile>(path));
    return files_opened(scratch / "log", std::string(HAE_PROGRAM) + " " + command + " " + path);
  };
  const hid_t external = H5Pcreate(H5P_DATASET_CREATE);
  H5Pset_external(external, other.c_str(), 0, 4 * 6 * 4 * 4);
  const std::array<hsize_t, 3> shape{4, 6, 4};
  const hid_t space = H5Screate_simple(3, shape.data(), nullptr);
  const hid_t view = H5Pcreate(H5P_DATASET_CREATE);
  H5Pset_virtual(view, space, other.c_str(), (kLayer + "/q").c_str(), space);
  const auto external_link = [&](const std::string& part) {
    return [&other, part](RawFile& raw) {
      raw.remove(part);
      H5Lcreate_external(other.c_str(), part.c_str(), raw.id(), part.c_str(), H5P_DEFAULT, H5P_DEFAULT);
    };
  };
  std::vector<Change> changes{[&](RawFile& raw) {
                                raw.replace(kLayer + "/q", H5T_IEEE_F32LE, {4, 6, 4}, nullptr, external);
                              },
                              [&](RawFile& raw) {
                                raw.replace(kLayer + "/q", H5T_IEEE_F32LE, {4, 6, 4}, nullptr, view);
                              }};
  for (const std::string& part : parts()) {
    changes.emplace_back(external_link(part));
  }
  for (const char* command : {"info", "check"}) {
    const std::set<std::string> sound = opened_after([](RawFile&) {}, command);
    EXPECT_TRUE(sound.contains(path));
    EXPECT_FALSE(sound.contains(other));
    for (const Change& change : changes) {
      for (const std::string& file : opened_after(change, command)) {
        EXPECT_TRUE(sound.contains(file)) << command << " opened " << file;
      }
    }
  }
  H5Pclose(view);
  H5Sclose(space);
  H5Pclose(external);
}

// ---- types

/// A type where numbers are expected, and how the message names it.
struct WrongType {
  hid_t type;
  const char* name;
};

std::vector<WrongType> wrong_types() {
  const hid_t compound = H5Tcreate(H5T_COMPOUND, 8);
  H5Tinsert(compound, "a", 0, H5T_NATIVE_INT);
  const hid_t enumeration = H5Tenum_create(H5T_NATIVE_INT);
  const int one = 1;
  H5Tenum_insert(enumeration, "ONE", &one);
  const hsize_t two = 2;
  const hid_t text = H5Tcopy(H5T_C_S1);
  H5Tset_size(text, H5T_VARIABLE);
  return {{compound, "a compound type"},
          {enumeration, "an enumeration"},
          {H5Tcreate(H5T_OPAQUE, 3), "another type"},
          {H5Tcopy(H5T_STD_REF_OBJ), "another type"},
          {H5Tvlen_create(H5T_NATIVE_INT), "another type"},
          {H5Tarray_create2(H5T_NATIVE_INT, 1, &two), "another type"},
          {text, "a variable-length string"}};
}

TEST(Hostile, TypesThatAreNoNumbersAreRefusedInEveryDataset) {
  for (const WrongType& wrong : wrong_types()) {
    for (const std::string& dataset :
         {kLayer + "/q", kLayer + "/v", kSequence + "/image", kSequence + "/window"}) {
      expect_changed_refused([&](RawFile& raw) { raw.replace(dataset, wrong.type, {6}); },
                             {dataset + ": found " + wrong.name});
    }
    H5Tclose(wrong.type);
  }
}

TEST(Hostile, IntegersAboveEightBytesAreRefused) {
  const auto of_size = [](std::size_t bytes) {
    const hid_t type = H5Tcopy(H5T_STD_I64LE);
    H5Tset_size(type, bytes);
    return type;
  };
  const std::vector<std::byte> zeros(6 * 16);
  for (const std::size_t bytes : {std::size_t{3}, std::size_t{8}, std::size_t{16}}) {
    const hid_t type = of_size(bytes);
    const Change change = [&](RawFile& raw) {
      raw.replace(kSequence + "/position", type, {6}, zeros.data());
    };
    bytes <= 8 ? expect_changed_accepted(change)
               : expect_changed_refused(change, {"/position: found int128", "at most 64 bits"});
    H5Tclose(type);
  }
}

/// Puts an attribute of any type and space, not written.
void put_attribute(RawFile& raw, const char* name, hid_t type, hid_t space) {
  raw.remove_attribute(kSequence, name);
  const hid_t attribute = H5Acreate_by_name(raw.id(), kSequence.c_str(), name, type, space, H5P_DEFAULT,
                                            H5P_DEFAULT, H5P_DEFAULT);
  EXPECT_GE(attribute, 0);
  H5Aclose(attribute);
  H5Sclose(space);
}

TEST(Hostile, AttributesOfWrongTypesAndShapesAreRefused) {
  for (const WrongType& wrong : wrong_types()) {
    const bool is_enumeration = H5Tget_class(wrong.type) == H5T_ENUM;  // h5py's bool
    const bool is_text = H5Tget_class(wrong.type) == H5T_STRING;
    for (const char* name : {"layers", "scale", "name"}) {
      if ((is_enumeration && name == std::string("layers")) || (is_text && name == std::string("name"))) {
        continue;
      }
      expect_changed_refused(
          [&](RawFile& raw) { put_attribute(raw, name, wrong.type, H5Screate(H5S_SCALAR)); },
          {kSequence + ": attribute '" + name + "' is not"});
    }
    H5Tclose(wrong.type);
  }
  const hsize_t two = 2;
  for (const char* name : {"layers", "scale", "name"}) {
    expect_changed_refused(
        [&](RawFile& raw) { put_attribute(raw, name, H5T_NATIVE_INT64, H5Screate_simple(1, &two, nullptr)); },
        {std::string("'") + name + "' is not one value"});
    expect_changed_refused(
        [&](RawFile& raw) { put_attribute(raw, name, H5T_NATIVE_INT64, H5Screate(H5S_NULL)); },
        {std::string("'") + name + "' is not one value"});
  }
}

TEST(Hostile, AnAttributeMayBeLongAndAFileMayHaveManyThatNobodyReads) {
  expect_changed_accepted([](RawFile& raw) {
    raw.set_attribute(kSequence, "model", std::string(60000, 'm'));
    for (int i = 0; i < 200; ++i) {
      raw.set_attribute(kSequence, "unknown" + std::to_string(i), Index{i});
    }
  });
}

// ---- storage

/// A dataset q in one chunk, which is then written as raw bytes.
void replace_by_chunk(RawFile& raw, const std::function<void(hid_t)>& add_filters, const std::string& bytes,
                      std::uint32_t skipped = 0) {
  const hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
  const std::array<hsize_t, 3> chunk{4, 6, 4};
  H5Pset_chunk(properties, 3, chunk.data());
  add_filters(properties);
  raw.replace(kLayer + "/q", H5T_IEEE_F32LE, {4, 6, 4}, nullptr, properties);
  const hid_t dataset = H5Dopen2(raw.id(), (kLayer + "/q").c_str(), H5P_DEFAULT);
  const std::array<hsize_t, 3> origin{};
  EXPECT_GE(H5Dwrite_chunk(dataset, H5P_DEFAULT, skipped, origin.data(), bytes.size(), bytes.data()), 0);
  H5Dclose(dataset);
  H5Pclose(properties);
}

std::string zlib_compressed(const std::string& bytes) {
  std::string packed(::compressBound(bytes.size()), '\0');
  uLongf length = packed.size();
  EXPECT_EQ(::compress(reinterpret_cast<Bytef*>(packed.data()), &length,
                       reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()),
            Z_OK);
  packed.resize(length);
  return packed;
}

constexpr std::size_t kChunkBytes = 4 * 6 * 4 * sizeof(float);

const std::function<void(hid_t)> kDeflate = [](hid_t properties) { H5Pset_deflate(properties, 1); };
const std::function<void(hid_t)> kFletcher32 = [](hid_t properties) { H5Pset_fletcher32(properties); };

/// Reading q, whose only chunk holds these bytes, is refused with these words, or is not.
void expect_chunk(const std::function<void(hid_t)>& filters, const std::string& bytes,
                  const std::optional<std::string>& words, std::uint32_t skipped = 0) {
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv());
  {
    RawFile raw(scratch / "trace.h5");
    replace_by_chunk(raw, filters, bytes, skipped);
  }
  const std::optional<std::string> message = reading_refusal(scratch / "trace.h5");
  EXPECT_EQ(message.has_value(), words.has_value()) << message.value_or("accepted");
  if (message && words) {
    EXPECT_NE(message->find(kLayer + "/q: " + *words), std::string::npos) << *message;
  }
}

Index peak_bytes() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return Index{usage.ru_maxrss} * 1024;
}

TEST(Hostile, AChunkThatUnpacksToMoreThanItsSizeCostsNoMemory) {
  const std::string chunk(kChunkBytes, '\0');
  expect_chunk(kDeflate, zlib_compressed(chunk), std::nullopt);
  const std::string bomb = zlib_compressed(std::string(std::size_t{1} << 28, '\0'));
  const Index before = peak_bytes();
  expect_chunk(kDeflate, bomb, "a chunk does not unpack to its 384 bytes");
  if (kMemoryIsBounded) {                              // the address sanitizer keeps freed memory
    EXPECT_LE(peak_bytes() - before, Index{1} << 24);  // of the 256 MiB
  }
}

TEST(Hostile, AChunkThatUnpacksToLessIsNotPaddedFromMemory) {
  const std::string chunk(kChunkBytes, '\0');
  expect_chunk(kDeflate, zlib_compressed(chunk.substr(1)), "a chunk does not unpack to its 384 bytes");
  expect_chunk(kDeflate, zlib_compressed(chunk).substr(0, 8), "a chunk does not unpack to its 384 bytes");
  expect_chunk(kDeflate, "no deflate stream", "a chunk does not unpack to its 384 bytes");
  expect_chunk(kDeflate, chunk, std::nullopt, 1);  // bit 0: this chunk is not deflated
  expect_chunk(kDeflate, chunk.substr(8), "a chunk holds 376 bytes, expected 384", 1);
  expect_chunk(kDeflate, chunk + "longer", "a chunk holds 390 bytes, expected 384", 1);
}

TEST(Hostile, AChecksumIsChecked) {
  // Fletcher's sums of 192 words of 1: 192, and 1 + 2 + ... + 192 = 18528 = 0x4860; the first in the low
  // half.
  std::string chunk;
  for (std::size_t word = 0; word < kChunkBytes / 2; ++word) {
    chunk += std::string("\0\1", 2);
  }
  const std::string sums("\xC0\x00\x60\x48", 4);
  expect_chunk(kFletcher32, chunk + sums, std::nullopt);
  std::string damaged = chunk + sums;
  damaged[7] = 3;
  expect_chunk(kFletcher32, damaged, "a chunk has another checksum than its bytes");
  expect_chunk(kFletcher32, "abc", "a chunk is too short for its checksum");
  expect_chunk(kFletcher32, chunk, std::nullopt, 1);  // bit 0: no checksum
}

TEST(Hostile, FiltersOtherThanThreeAndDeflateTwiceAreRefused) {
  const auto with = [](const std::function<void(hid_t)>& add, hid_t type) {
    return [add, type](RawFile& raw) {
      const hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
      const std::array<hsize_t, 1> chunk{6};
      H5Pset_chunk(properties, 1, chunk.data());
      add(properties);
      const std::array<std::int64_t, 6> values{};
      raw.replace(kSequence + "/position", type, {6}, values.data(), properties);
      H5Pclose(properties);
    };
  };
  expect_changed_accepted(with(
      [](hid_t properties) {
        H5Pset_shuffle(properties);
        H5Pset_deflate(properties, 1);
        H5Pset_fletcher32(properties);
      },
      H5T_NATIVE_INT64));
  expect_changed_refused(with([](hid_t properties) { H5Pset_nbit(properties); }, H5T_NATIVE_INT64),
                         {"/position: found filter 5"});
  expect_changed_refused(
      with([](hid_t properties) { H5Pset_scaleoffset(properties, H5Z_SO_INT, 0); }, H5T_NATIVE_INT64),
      {"/position: found filter 6"});
  expect_changed_refused(with(
                             [](hid_t properties) {
                               H5Pset_deflate(properties, 1);
                               H5Pset_deflate(properties, 1);
                             },
                             H5T_NATIVE_INT64),
                         {"/position: found the filter deflate twice"});
}

TEST(Hostile, AnOddNumberOfPackedBytesReads) {
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv());
  const std::array<signed char, 6> image{-1, 3, 3, -1, -1, -1};
  {
    RawFile raw(scratch / "trace.h5");
    const hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
    const hsize_t chunk = 5;  // HDF5 sums an odd last byte as the high half of a word
    H5Pset_chunk(properties, 1, &chunk);
    H5Pset_deflate(properties, 1);
    H5Pset_fletcher32(properties);
    raw.replace(kSequence + "/image", H5T_NATIVE_SCHAR, {6}, image.data(), properties);
    H5Pclose(properties);
  }
  EXPECT_EQ(TraceFile(scratch / "trace.h5").open(0)->info().image,
            (std::vector<Index>{-1, 3, 3, -1, -1, -1}));
}

/// Replaces a dataset by one of a single chunk, `bytes` of it stored.
void replace_by_one_chunk(RawFile& raw, const std::string& path, hid_t type,
                          const std::vector<hsize_t>& shape, const std::string& bytes) {
  const hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
  H5Pset_chunk(properties, static_cast<int>(shape.size()), shape.data());
  H5Pset_deflate(properties, 9);
  raw.replace(path, type, shape, nullptr, properties);
  H5Pclose(properties);
  const hid_t dataset = H5Dopen2(raw.id(), path.c_str(), H5P_DEFAULT);
  const std::vector<hsize_t> origin(shape.size(), 0);
  EXPECT_GE(H5Dwrite_chunk(dataset, H5P_DEFAULT, 0, origin.data(), bytes.size(), bytes.data()), 0);
  H5Dclose(dataset);
}

TEST(Hostile, AFewBytesThatUnpackToMuchMetadataMeetTheLimitOfMemory) {
  // 6 tokens of n axes, one byte each, as numbers of 8 bytes: 48 n. 2^25 n are 1.5 GiB, 2^20 are 48 MiB.
  const auto positions = [](hsize_t axes) {
    return [axes](RawFile& raw) {
      replace_by_one_chunk(raw, kSequence + "/position", H5T_NATIVE_SCHAR, {6, axes},
                           zlib_compressed(std::string(6 * axes, '\0')));
    };
  };
  expect_changed_accepted(positions(1 << 20));
  if (!kMemoryIsBounded) {
    GTEST_SKIP() << "the address sanitizer needs terabytes of addresses";
  }
  expect_changed_refused(positions(1 << 25), {"its metadata asks for more than 1073741824 bytes of memory"});
}

TEST(Hostile, DeclaredTokensMeetTheirOwnLimit) {
  expect_changed_refused([](RawFile& raw) { raw.set_attribute(kSequence, "tokens", (Index{1} << 24) + 1); },
                         {"tokens is 16777217, expected 1 .. 16777216"});
}

TEST(Hostile, ATraceBehindAUserBlockReads) {
  const Scratch scratch;
  for (const std::size_t block : {std::size_t{512}, std::size_t{2048}}) {
    write_small(scratch / "plain.h5", small_qkv());
    write_bytes(scratch / "trace.h5", std::string(block, '#') + read_bytes(scratch / "plain.h5"));
    EXPECT_EQ(reading_refusal(scratch / "trace.h5"), std::nullopt) << *refusal(scratch / "trace.h5");
  }
  write_bytes(scratch / "trace.h5", std::string(700, '#') + read_bytes(scratch / "plain.h5"));
  expect_refused(scratch / "trace.h5", {"not an HDF5 file"});
}

// ---- run files

TEST(Hostile, ARunFileIsReadAsWarily) {
  const Scratch scratch;
  const std::filesystem::path path = scratch / "run.h5";
  const auto message_after = [&](const Change& change) -> std::string {
    StoredRun run;
    run.identity.options = {{"budget", "8"}};
    run.log.entries = {{0, 0, kLayerLane, 1, false, 0.5, std::nullopt, std::nullopt}};
    write_runs(path, {"{}", {{"trace.h5", ""}}, {run}});
    change(*std::make_unique<RawFile>(path));
    try {
      (void)read_runs(path);
    } catch (const TraceError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message_after([](RawFile&) {}), "");
  const std::string run = "/runs/000000";
  for (const std::string& part :
       {std::string("/runs"), run, run + "/log", run + "/log/token", run + "/pending", run + "/option_key",
        std::string("/manifest"), std::string("/trace_path")}) {
    const auto soft = [&](RawFile& raw) {
      H5Lmove(raw.id(), part.c_str(), raw.id(), "/elsewhere", H5P_DEFAULT, H5P_DEFAULT);
      H5Lcreate_soft("/elsewhere", raw.id(), part.c_str(), H5P_DEFAULT, H5P_DEFAULT);
    };
    EXPECT_NE(message_after(soft).find(part + ": found a soft link"), std::string::npos) << part;
  }
  for (const WrongType& wrong : wrong_types()) {
    const auto replace = [&](RawFile& raw) { raw.replace(run + "/log/token", wrong.type, {1}); };
    EXPECT_NE(message_after(replace).find("/log/token: found "), std::string::npos) << wrong.name;
    H5Tclose(wrong.type);
  }
  const auto huge = [&](RawFile& raw) { raw.replace(run + "/log/layer", H5T_STD_I64LE, {hsize_t{1} << 40}); };
  EXPECT_NE(message_after(huge).find("/log/layer: declares 8796093022208 bytes"), std::string::npos);
}

}  // namespace
}  // namespace hae::traces::test
