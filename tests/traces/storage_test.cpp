#include <array>
#include <bit>
#include <cstring>

#include "tests/traces/fixtures.hpp"

namespace hae::traces::test {
namespace {

/// All keys of a layer, in order.
std::vector<float> keys(const std::filesystem::path& path, OpenOptions options = {}) {
  TraceFile trace(path, options);
  const auto layer = trace.open(0)->layer(0);
  const View<const float, 3> view = layer->keys();
  return {view.data(), view.data() + view.size()};
}

std::vector<float> queries(LayerPayload& layer, const SequenceInfo& info, Range rows) {
  std::vector<float> values(static_cast<std::size_t>(info.query_heads * rows.size() * *info.head_dim));
  layer.read_queries(rows, {values.data(), {info.query_heads, rows.size(), *info.head_dim}});
  return values;
}

hid_t sixteen_bits(bool bfloat16, hid_t base) {
  const hid_t type = H5Tcopy(base);
  if (bfloat16) {
    H5Tset_fields(type, 15, 7, 8, 0, 7);
  } else {
    H5Tset_fields(type, 15, 10, 5, 0, 10);
  }
  H5Tset_size(type, 2);
  H5Tset_ebias(type, bfloat16 ? 127 : 15);
  return type;
}

void replace_all_keys(const std::filesystem::path& path, hid_t type, const void* codes,
                      hid_t properties = H5P_DEFAULT) {
  RawFile raw(path);
  for (const char* layer : {"/layers/000000", "/layers/000001"}) {
    raw.replace(kSequence + layer + "/k", type, {2, 6, 4}, codes, properties);
  }
}

TEST(Storage, BigEndianFloat32ReadsAsItsValue) {
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv());
  // 1.0 is 3F 80 00 00 in this order; misread it would be 4.6e-41.
  std::vector<std::array<unsigned char, 4>> codes(48, {0x3F, 0x80, 0, 0});
  codes[23] = {0xC0, 0x20, 0, 0};  // -2.5
  replace_all_keys(scratch / "trace.h5", H5T_IEEE_F32BE, codes.data());
  std::vector<float> expected(48, 1.0F);
  expected[23] = -2.5F;
  EXPECT_EQ(keys(scratch / "trace.h5"), expected);
  EXPECT_EQ(keys(scratch / "trace.h5", {.memory_map = false}), expected);
}

TEST(Storage, HalfAndBfloat16OfEitherByteOrderAreToldApart) {
  struct Case {
    bool bfloat16;
    hid_t base;
    std::array<unsigned char, 2> code;
    float value;
  };
  const std::vector<Case> cases{
      {false, H5T_IEEE_F32LE, {0x80, 0x3F}, 1.875F}, {true, H5T_IEEE_F32LE, {0x80, 0x3F}, 1.0F},
      {false, H5T_IEEE_F32BE, {0x3F, 0x80}, 1.875F}, {true, H5T_IEEE_F32BE, {0x3F, 0x80}, 1.0F},
      {false, H5T_IEEE_F32LE, {0x00, 0x3C}, 1.0F},   {true, H5T_IEEE_F32LE, {0x00, 0x3C}, 0.0078125F}};
  for (const Case& c : cases) {
    const Scratch scratch;
    write_small(scratch / "trace.h5", small_qkv());
    const hid_t type = sixteen_bits(c.bfloat16, c.base);
    const std::vector<std::array<unsigned char, 2>> codes(48, c.code);
    replace_all_keys(scratch / "trace.h5", type, codes.data());
    H5Tclose(type);
    EXPECT_EQ(keys(scratch / "trace.h5"), std::vector<float>(48, c.value));
    EXPECT_EQ(keys(scratch / "trace.h5", {.memory_map = false}), std::vector<float>(48, c.value));
  }
}

TEST(Storage, ElementBytesFollowTheStoredTypeOfKeysUnlessStated) {
  const Scratch scratch;
  SequenceInfo info = small_qkv();
  info.element_bytes.reset();
  write_small(scratch / "trace.h5", info, FloatType::float16);
  EXPECT_EQ(TraceFile(scratch / "trace.h5").open(0)->info().element_bytes, 2);
  info.element_bytes = 1;  // a recorder that widened an 8-bit cache says so
  write_small(scratch / "trace.h5", info, FloatType::float16);
  EXPECT_EQ(TraceFile(scratch / "trace.h5").open(0)->info().element_bytes, 1);
}

TEST(Storage, ElementOneTwoThreeOfTwoByThreeByFourIsTheLast) {
  const Scratch scratch;
  SequenceInfo info = small_qkv();
  info.tokens = info.prompt = 3;
  info.image.resize(3);
  info.prompt_rows = {0, 1, 2};
  TraceWriter writer(scratch / "trace.h5", {});
  writer.begin_sequence(info, {}, FloatType::float32);
  for (Index layer = 0; layer < 2; ++layer) {
    for (const LayerArray array : arrays_of(info)) {
      for (Index head = 0; head < heads_of(info, array); ++head) {
        std::vector<float> values(12);
        std::iota(values.begin(), values.end(), static_cast<float>(12 * head));
        writer.write_head(layer, array, head, values);
      }
    }
  }
  writer.finish();
  TraceFile trace(scratch / "trace.h5");
  EXPECT_EQ(trace.open(0)->layer(0)->keys()[1][2][3], 23.0F);
}

/// Rewrites every payload dataset in chunks, shuffled, deflated and with checksums.
void rewrite_in_chunks(const std::filesystem::path& path, const SequenceInfo& info,
                       const std::array<hsize_t, 3>& chunk, bool filters) {
  const hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
  H5Pset_chunk(properties, 3, chunk.data());
  if (filters) {
    H5Pset_shuffle(properties);
    H5Pset_deflate(properties, 6);
    H5Pset_fletcher32(properties);
  }
  RawFile raw(path);
  for (Index layer = 0; layer < info.layers; ++layer) {
    for (const LayerArray array : arrays_of(info)) {
      const char* names[] = {"q", "k", "v", "prompt", "decode"};
      std::vector<float> values;
      for (Index head = 0; head < heads_of(info, array); ++head) {
        const std::vector<float> one = exact_head(info, array, layer, head);
        values.insert(values.end(), one.begin(), one.end());
      }
      raw.replace(kSequence + "/layers/00000" + std::to_string(layer) + "/" + names[static_cast<int>(array)],
                  H5T_NATIVE_FLOAT,
                  {static_cast<hsize_t>(heads_of(info, array)), static_cast<hsize_t>(info.tokens),
                   static_cast<hsize_t>(*info.head_dim)},
                  values.data(), properties);
    }
  }
  H5Pclose(properties);
}

TEST(Storage, EveryLayoutAndEveryBlockReadsTheSame) {
  const Scratch scratch;
  const SequenceInfo info = small_qkv();
  write_small(scratch / "contiguous.h5", info);
  TraceFile contiguous(scratch / "contiguous.h5");
  const auto expected_layer = contiguous.open(0)->layer(1);
  for (const std::array<hsize_t, 3>& chunk :
       {std::array<hsize_t, 3>{1, 1, 1}, {2, 4, 3}, {1, 6, 4}, {2, 6, 4}, {2, 1, 2}}) {
    for (const bool filters : {false, true}) {
      write_small(scratch / "chunked.h5", info);
      rewrite_in_chunks(scratch / "chunked.h5", info, chunk, filters);
      TraceFile chunked(scratch / "chunked.h5");
      const auto layer = chunked.open(0)->layer(1);
      EXPECT_EQ(keys(scratch / "chunked.h5"), keys(scratch / "contiguous.h5"));
      for (Index begin = 0; begin < info.tokens; ++begin) {
        for (Index end = begin; end <= info.tokens; ++end) {
          EXPECT_EQ(queries(*layer, info, {begin, end}), queries(*expected_layer, info, {begin, end}));
        }
      }
    }
  }
}

TEST(Storage, CompactDatasetsAreRead) {
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv());
  const hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
  H5Pset_layout(properties, H5D_COMPACT);
  std::vector<float> values(48);
  std::iota(values.begin(), values.end(), 0.0F);
  replace_all_keys(scratch / "trace.h5", H5T_NATIVE_FLOAT, values.data(), properties);
  H5Pclose(properties);
  EXPECT_EQ(keys(scratch / "trace.h5"), values);
}

TEST(Storage, IntegersOfAnyTypeAreRead) {
  const std::array<signed char, 6> image8{-1, 3, 3, -1, -1, -1};
  const std::array<std::uint64_t, 6> modality64{0, 1, 1, 0, 0, 0};
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv());
  {
    RawFile raw(scratch / "trace.h5");
    raw.replace(kSequence + "/image", H5T_NATIVE_SCHAR, {6}, image8.data());
    raw.replace(kSequence + "/modality", H5T_NATIVE_UINT64, {6}, modality64.data());
    std::array<std::uint16_t, 2> window{};
    window[1] = std::endian::native == std::endian::little ? 0x0300 : 3;  // 3, most significant byte first
    raw.replace(kSequence + "/window", H5T_STD_U16BE, {2});
    const hid_t dataset = H5Dopen2(raw.id(), (kSequence + "/window").c_str(), H5P_DEFAULT);
    H5Dwrite(dataset, H5T_STD_U16BE, H5S_ALL, H5S_ALL, H5P_DEFAULT, window.data());
    H5Dclose(dataset);
  }
  TraceFile trace(scratch / "trace.h5");
  const SequenceInfo info = trace.open(0)->info();
  EXPECT_EQ(info.image, (std::vector<Index>{-1, 3, 3, -1, -1, -1}));
  EXPECT_EQ(info.masks[1].window, 3);
}

TEST(Storage, DefaultsApplyWhereOptionalPartsAreMissing) {
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv());
  {
    RawFile raw(scratch / "trace.h5");
    raw.remove(kSequence + "/window");
    raw.remove(kSequence + "/bidirectional");
    raw.remove_attribute(kSequence, "group");
    raw.remove_attribute(kSequence, "model");
    raw.remove_attribute("/", "recorder");
  }
  TraceFile trace(scratch / "trace.h5");
  EXPECT_EQ(trace.open(0)->info().masks, std::vector<MaskRule>(2));
  EXPECT_EQ(trace.open(0)->info().group, "small");
}

/// Bytes that this process has asked the system to read so far.
Index bytes_read() {
  std::ifstream io("/proc/self/io");
  std::string key;
  Index value = 0;
  while (io >> key >> value) {
    if (key == "rchar:") {
      return value;
    }
  }
  return 0;
}

TEST(Storage, ReadingRowByRowReadsEachChunkOnce) {
  const Scratch scratch;
  SequenceInfo info = small_qkv();
  info.layers = 1;
  info.masks.resize(1);
  info.tokens = info.prompt = 2048;
  info.head_dim = 256;
  info.image.assign(2048, -1);
  info.prompt_rows.resize(2048);
  std::iota(info.prompt_rows.begin(), info.prompt_rows.end(), Index{0});
  write_small(scratch / "trace.h5", info);
  // 4 heads * 2048 tokens * 256 dimensions * 4 bytes = 8 MiB in 4 chunks; the library's own cache holds 1
  // MiB.
  rewrite_in_chunks(scratch / "trace.h5", info, {2, 1024, 256}, false);
  TraceFile trace(scratch / "trace.h5");
  const auto layer = trace.open(0)->layer(0);
  const Index before = bytes_read();
  for (Index row = 0; row < info.tokens; ++row) {
    (void)queries(*layer, info, {row, row + 1});
  }
  const Index stored = Index{8} << 20;
  EXPECT_GE(bytes_read() - before, stored);
  EXPECT_LE(bytes_read() - before, stored + stored / 10);
}

}  // namespace
}  // namespace hae::traces::test
