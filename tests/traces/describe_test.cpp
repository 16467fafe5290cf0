#include "traces/describe.hpp"

#include <algorithm>
#include <array>

#include "tests/traces/fixtures.hpp"

namespace hae::traces::test {
namespace {

SequenceSummary describe_first(const std::filesystem::path& path) {
  TraceFile trace(path);
  return describe(trace).sequences.at(0);
}

bool has_lint(const SequenceSummary& summary, const std::string& words) {
  return std::any_of(summary.lint.begin(), summary.lint.end(),
                     [&](const std::string& lint) { return lint.find(words) != std::string::npos; });
}

TEST(Describe, CountsTokensBytesAndImages) {
  const Scratch scratch;
  SequenceInfo info = small_qkv();
  info.image = {0, 7, 7, 0, -1, 3};
  write_small(scratch / "trace.h5", info, FloatType::float16);
  const SequenceSummary summary = describe_first(scratch / "trace.h5");
  EXPECT_EQ(summary.visual_tokens, 5);
  EXPECT_EQ(summary.text_tokens, 1);
  ASSERT_EQ(summary.images.size(), 3u);
  EXPECT_EQ(summary.images[0].image, 0);
  EXPECT_EQ(summary.images[0].tokens, 2);
  EXPECT_EQ(summary.images[0].spans, (std::vector<Range>{{0, 1}, {3, 4}}));
  EXPECT_EQ(summary.images[1].spans, (std::vector<Range>{{5, 6}}));
  EXPECT_EQ(summary.images[2].spans, (std::vector<Range>{{1, 3}}));
  // 2 layers * (4 query heads + 2 * 2 KV heads) * 6 tokens * 4 dimensions * 2 bytes.
  EXPECT_EQ(summary.payload_bytes, 768);
  // 2 (K and V) * 2 layers * 2 KV heads * 6 tokens * 4 dimensions * the 4 bytes that the info states.
  EXPECT_EQ(summary.cache_bytes, 768);
}

TEST(Describe, SaysNothingInBytesWhereNothingIsKnown) {
  const Scratch scratch;
  SequenceInfo info = small_attention();
  info.head_dim.reset();
  info.element_bytes.reset();
  write_small(scratch / "trace.h5", info);
  const SequenceSummary summary = describe_first(scratch / "trace.h5");
  EXPECT_EQ(summary.cache_bytes, std::nullopt);
  EXPECT_TRUE(has_lint(summary, "head_dim is missing"));
  EXPECT_TRUE(has_lint(summary, "v is missing"));
}

TEST(Describe, FindsPictures) {
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv());
  EXPECT_TRUE(has_lint(describe_first(scratch / "trace.h5"), "picture of image 0 is missing"));
  {
    RawFile raw(scratch / "trace.h5");
    H5Gclose(H5Gcreate2(raw.id(), (kSequence + "/pictures").c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    const std::array<unsigned char, 12> pixels{};
    raw.replace(kSequence + "/pictures/0", H5T_NATIVE_UCHAR, {2, 2, 3}, pixels.data());
  }
  const SequenceSummary summary = describe_first(scratch / "trace.h5");
  EXPECT_TRUE(summary.images.at(0).has_picture);
  EXPECT_FALSE(has_lint(summary, "picture"));
}

TEST(Describe, ListsHowDatasetsAreStored) {
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv(), FloatType::bfloat16);
  const SequenceSummary summary = describe_first(scratch / "trace.h5");
  const StoredDataset& last = summary.datasets.back();
  EXPECT_EQ(last.path, "layers/000001/v");
  EXPECT_EQ(last.type, "bfloat16");
  EXPECT_EQ(last.shape, (std::vector<Index>{2, 6, 4}));
  EXPECT_TRUE(last.chunk.empty());
  EXPECT_EQ(last.declared_bytes, 96);
  EXPECT_EQ(last.stored_bytes, 96);
}

TEST(Describe, WarnsOfChunksThatReadSlowly) {
  struct Case {
    std::array<hsize_t, 3> chunk;
    bool deflate;
    std::string words;
  };
  const std::vector<Case> cases{
      {{1, 1, 1}, false, "q has chunks of 4 bytes: reading is slow"},
      {{4, 1024, 512}, false, "q has chunks of 8388608 bytes: reading needs much memory"},
      {{1, 64, 512}, true, "q is compressed"},
      {{1, 64, 512}, false, "q is chunked"}};
  for (const Case& c : cases) {
    const Scratch scratch;
    SequenceInfo info = small_qkv();
    info.layers = 1;
    info.masks.resize(1);
    info.head_dim = 512;
    info.tokens = info.prompt = c.chunk[2] == 1 ? 24 : 1024;
    info.image.assign(static_cast<std::size_t>(info.tokens), -1);
    info.prompt_rows.resize(info.image.size());
    std::iota(info.prompt_rows.begin(), info.prompt_rows.end(), Index{0});
    write_small(scratch / "trace.h5", info);
    {
      const hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
      H5Pset_chunk(properties, 3, c.chunk.data());
      if (c.deflate) {
        H5Pset_deflate(properties, 1);
      }
      const std::vector<float> values(static_cast<std::size_t>(4 * info.tokens * 512), 1.0F);
      RawFile(scratch / "trace.h5")
          .replace(kLayer + "/q", H5T_NATIVE_FLOAT, {4, static_cast<hsize_t>(info.tokens), 512},
                   values.data(), properties);
      H5Pclose(properties);
    }
    const SequenceSummary summary = describe_first(scratch / "trace.h5");
    EXPECT_TRUE(has_lint(summary, c.words)) << c.words;
    EXPECT_FALSE(has_lint(summary, "k is")) << "k is contiguous";
  }
}

TEST(Describe, WarnsOfPromptRowsThatAreNotStoredAndOfNoDecodeSteps) {
  const Scratch scratch;
  SequenceInfo info = small_attention();
  info.prompt_rows = {3};
  write_small(scratch / "trace.h5", info);
  EXPECT_TRUE(has_lint(describe_first(scratch / "trace.h5"), "only 1 of 4 prompt rows"));
  info = small_qkv();
  info.tokens = 4;
  info.image.resize(4);
  write_small(scratch / "trace.h5", info);
  EXPECT_TRUE(has_lint(describe_first(scratch / "trace.h5"), "no decode steps"));
  EXPECT_TRUE(
      has_lint(describe_first(scratch / "trace.h5"), "generated is 3, as a rule it is decode steps + 1 = 1"));
}

}  // namespace
}  // namespace hae::traces::test
