#include "traces/attention_saver.hpp"

#include <cstdint>
#include <limits>

#include "tests/traces/imported.hpp"
#include "traces/check.hpp"
#include "traces/float16.hpp"

namespace hae::traces::test {
namespace {

/// Causal rows of 3 tokens: (1), (1/2, 1/2), (1/4, 1/4, 1/2).
const std::vector<float> kRows{1, 0, 0, 0.5F, 0.5F, 0, 0.25F, 0.25F, 0.5F};
/// (1), (1, 0), (0, 0, 1).
const std::vector<float> kSharpRows{1, 0, 0, 1, 0, 0, 0, 0, 1};

/// An HDF5 file made with the C API alone, group by group.
class RecordedFile {
 public:
  explicit RecordedFile(const std::filesystem::path& path)
      : id_(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT)),
        links_(H5Pcreate(H5P_LINK_CREATE)) {
    H5Pset_create_intermediate_group(links_, 1);
  }
  ~RecordedFile() {
    H5Pclose(links_);
    H5Fclose(id_);
  }
  RecordedFile(const RecordedFile&) = delete;
  RecordedFile& operator=(const RecordedFile&) = delete;

  [[nodiscard]] hid_t id() const { return id_; }
  [[nodiscard]] hid_t links() const { return links_; }

  void add(const std::string& path, hid_t type, const std::vector<hsize_t>& shape, const void* data,
           hid_t properties = H5P_DEFAULT) {
    const hid_t space = H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr);
    const hid_t dataset = H5Dcreate2(id_, path.c_str(), type, space, links_, properties, H5P_DEFAULT);
    ASSERT_GE(dataset, 0) << path;
    ASSERT_GE(H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data), 0);
    H5Dclose(dataset);
    H5Sclose(space);
  }

  void add(const std::string& path, const std::vector<float>& rows = kRows) {
    const auto tokens = static_cast<hsize_t>(rows.size() == 9 ? 3 : 2);
    add(path, H5T_IEEE_F32LE, {tokens, tokens}, rows.data());
  }

  void add_halves(const std::string& path, const std::vector<std::uint16_t>& codes, hsize_t tokens) {
    const hid_t half = H5Tcopy(H5T_IEEE_F32LE);
    H5Tset_fields(half, 15, 10, 5, 0, 10);
    H5Tset_size(half, 2);
    H5Tset_ebias(half, 15);
    add(path, half, {tokens, tokens}, codes.data());
    H5Tclose(half);
  }

 private:
  hid_t id_;
  hid_t links_;
};

/// 2 layers of 2 heads.
void add_everything(RecordedFile& file, const std::string& batch = "batch_0") {
  for (const char* layer : {"layer_0/", "layer_1/"}) {
    file.add(layer + batch + "/head_0", kRows);
    file.add(layer + batch + "/head_1", kSharpRows);
  }
}

AttentionSaverOptions of_prompt(Index prompt, std::vector<Range> images = {}) {
  AttentionSaverOptions options;
  options.sequence.prompt = prompt;
  options.sequence.images = std::move(images);
  return options;
}

/// Something that makes a file, an import of it, and what came out.
template <typename Make>
class Imported : public ImportedTrace {
 public:
  explicit Imported(Make make, const AttentionSaverOptions& options = of_prompt(2)) {
    {
      RecordedFile file(scratch() / "in.h5");
      make(file);
    }
    import_attention_saver(scratch() / "in.h5", to(), options);
    open();
  }
};

template <typename Error, typename Make>
void expect_throw(Make make, const std::vector<std::string>& words, const AttentionSaverOptions& options) {
  const Scratch scratch;
  {
    RecordedFile file(scratch / "in.h5");
    make(file);
  }
  expect_import_error<Error>([&](const auto& to) { import_attention_saver(scratch / "in.h5", to, options); },
                             words);
}

template <typename Make>
void expect_refused(Make make, std::vector<std::string> words,
                    const AttentionSaverOptions& options = of_prompt(2)) {
  words.emplace_back("in.h5:");
  expect_throw<TraceError>(make, words, options);
}

template <typename Make>
void expect_rejected(Make make, const std::vector<std::string>& words, const AttentionSaverOptions& options) {
  expect_throw<ConfigError>(make, words, options);
}

const auto kEverything = [](RecordedFile& file) { add_everything(file); };

// ---- what is read

TEST(AttentionSaver, CutsEachHeadIntoPromptAndDecodeRows) {
  Imported imported(kEverything);
  const SequenceInfo& info = imported.info();
  EXPECT_EQ(info.name, "in");
  EXPECT_EQ(info.group, "in");
  EXPECT_EQ(info.payload, Payload::attention);
  EXPECT_EQ(info.layers, 2);
  EXPECT_EQ(info.query_heads, 2);
  EXPECT_EQ(info.kv_heads, 2);  // as many as query heads, unless told
  EXPECT_EQ(info.head_dim, std::nullopt);
  EXPECT_EQ(info.element_bytes, std::nullopt);
  EXPECT_EQ(info.tokens, 3);
  EXPECT_EQ(info.prompt, 2);
  EXPECT_EQ(info.generated, 2);
  EXPECT_EQ(info.image, (std::vector<Index>{-1, -1, -1}));
  EXPECT_FALSE(info.has_values);
  for (Index layer = 0; layer < 2; ++layer) {
    EXPECT_EQ(imported.prompt_rows(layer), (std::vector<float>{1, 0, 0.5F, 0.5F, 1, 0, 1, 0}));
    EXPECT_EQ(imported.first_step(layer), (std::vector<float>{0.25F, 0.25F, 0.5F, 0, 0, 1}));
  }
  EXPECT_EQ(check_trace(imported.trace()).total, 0);
}

TEST(AttentionSaver, KnowsWhatItIsTold) {
  AttentionSaverOptions options = of_prompt(3, {{2, 3}, {0, 1}});
  options.kv_heads = 1;
  options.head_dim = 64;
  options.sequence.name = "a dog";
  options.sequence.group = "dogs";
  options.sequence.origin = {"hae import", "", "hae import dog.h5"};
  Imported imported(kEverything, options);
  EXPECT_EQ(imported.info().image, (std::vector<Index>{0, -1, 1}));  // numbered in the order of tokens
  EXPECT_EQ(imported.info().kv_heads, 1);
  EXPECT_EQ(imported.info().head_dim, 64);
  EXPECT_EQ(imported.info().element_bytes, 4);
  EXPECT_EQ(imported.info().scale, 0.125);  // 1 / sqrt(64)
  EXPECT_EQ(imported.info().name, "a dog");
  EXPECT_EQ(imported.info().group, "dogs");
  EXPECT_EQ(imported.info().steps(), 0);
  EXPECT_EQ(imported.trace().origin(), options.sequence.origin);
}

TEST(AttentionSaver, KeepsTouchingPicturesApart) {
  EXPECT_EQ(Imported(kEverything, of_prompt(3, {{0, 2}, {2, 3}})).info().image,
            (std::vector<Index>{0, 0, 1}));
}

TEST(AttentionSaver, KeepsEveryHalfOfARowAsItIs) {
  // 0x3BFF is 1 - 2^-11, the half below 1; 0x0001 is 2^-24, the smallest there is; both sums are within 2e-3
  // of 1.
  const std::vector<std::uint16_t> codes{0x3BFF, 0, 0x0001, 0x3BFF};
  Imported imported([&](RecordedFile& file) { file.add_halves("layer_0/batch_0/head_0", codes, 2); });
  EXPECT_EQ(imported.trace().datasets(0).back().type, "float16");
  EXPECT_EQ(imported.prompt_rows(0), (std::vector<float>{1 - 0x1p-11F, 0, 0x1p-24F, 1 - 0x1p-11F}));
}

TEST(AttentionSaver, ReadsChunkedAndDeflatedRowsWhateverTheChunk) {
  // 700 tokens are read in bands of 374 rows (2^18 / 700): two of them, also when chunks are higher or lower.
  constexpr hsize_t kTokens = 700;
  std::vector<float> rows(kTokens * kTokens);
  for (hsize_t query = 0; query < kTokens; ++query) {
    rows[query * kTokens + query * 7 % (query + 1)] = 1;
  }
  for (const auto& [height, width] : {std::pair<hsize_t, hsize_t>{1, 700}, {64, 33}, {500, 10}, {700, 700}}) {
    const std::vector<hsize_t> chunk{height, width};
    const hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_chunk(properties, 2, chunk.data());
    H5Pset_deflate(properties, 1);
    Imported imported(
        [&](RecordedFile& file) {
          file.add("layer_0/batch_0/head_0", H5T_IEEE_F32LE, {kTokens, kTokens}, rows.data(), properties);
        },
        of_prompt(kTokens));
    H5Pclose(properties);
    EXPECT_EQ(imported.prompt_rows(0), rows) << height << " x " << width;
  }
}

TEST(AttentionSaver, LeavesRowsOfPaddingAsTheyAre) {
  // A token that padding hides attends to nothing: a row of zeros is masked, not wrong.
  const std::vector<float> padded{0, 0, 0, 0, 1, 0, 0, 0.5F, 0.5F};
  Imported imported([&](RecordedFile& file) { file.add("layer_0/batch_0/head_0", padded); });
  EXPECT_EQ(check_trace(imported.trace()).masked_rows, 1);
}

TEST(AttentionSaver, TakesTheBatchItIsTold) {
  const auto two = [](RecordedFile& file) {
    file.add("layer_0/batch_3/head_0", kRows);
    file.add("layer_0/batch_11/head_0", kSharpRows);
  };
  AttentionSaverOptions options = of_prompt(2);
  options.batch = 11;
  EXPECT_EQ(Imported(two, options).first_step(0), (std::vector<float>{0, 0, 1}));
  options.batch = 3;
  EXPECT_EQ(Imported(two, options).first_step(0), (std::vector<float>{0.25F, 0.25F, 0.5F}));
  expect_rejected(two, {"batch is missing", "one of the 2", "such as 3"}, of_prompt(2));
  options.batch = 0;
  expect_rejected(two, {"batch is 0", "such as 3"}, options);
}

TEST(AttentionSaver, OrdersLayersAndHeadsByNumber) {
  // As text "head_10" comes before "head_2".
  Imported imported([](RecordedFile& file) {
    for (int head = 0; head < 12; ++head) {
      file.add("layer_0/batch_0/head_" + std::to_string(head), head == 10 ? kSharpRows : kRows);
    }
  });
  const std::vector<float> steps = imported.first_step(0);
  for (std::size_t head = 0; head < 12; ++head) {
    EXPECT_EQ(steps[3 * head], head == 10 ? 0 : 0.25F) << head;
  }
}

// ---- what is refused

TEST(AttentionSaverRefuses, FilesThatAreNoHdf5) {
  const Scratch scratch;
  write_bytes(scratch / "text.h5", "no HDF5 at all");
  EXPECT_THROW(import_attention_saver(scratch / "text.h5", scratch / "out.h5", of_prompt(2)), TraceError);
  EXPECT_THROW(import_attention_saver("/nowhere.h5", scratch / "out.h5", of_prompt(2)), TraceError);
  EXPECT_THROW(import_attention_saver("/", scratch / "out.h5", of_prompt(2)), TraceError);
}

TEST(AttentionSaverRefuses, GapsNamingWhatIsMissing) {
  expect_refused([](RecordedFile&) {}, {":/layer_0: missing"});
  expect_refused([](RecordedFile& file) { file.add("layer_5/batch_0/head_0"); },
                 {":/layer_0: missing, expected layer_0 .. layer_5"});
  expect_refused(
      [](RecordedFile& file) {
        file.add("layer_0/batch_0/head_0");
        file.add("layer_2/batch_0/head_0");
      },
      {":/layer_1: missing, expected layer_0 .. layer_2"});
  expect_refused(
      [](RecordedFile& file) {
        file.add("layer_0/batch_0/head_0");
        file.add("layer_0/batch_0/head_2");
      },
      {":/layer_0/batch_0/head_1: missing"});
}

TEST(AttentionSaverRefuses, LayersThatDisagree) {
  expect_refused(
      [](RecordedFile& file) {
        file.add("layer_0/batch_0/head_0");
        file.add("layer_0/batch_0/head_1");
        file.add("layer_1/batch_0/head_0");
      },
      {":/layer_1/batch_0/head_1: missing"});
  expect_refused(
      [](RecordedFile& file) {
        add_everything(file);
        file.add("layer_1/batch_0/head_2");
      },
      {":/layer_1/batch_0/head_2: found, expected head_0 .. head_1"});
  AttentionSaverOptions second = of_prompt(2);
  second.batch = 1;
  expect_refused(
      [](RecordedFile& file) {
        add_everything(file);
        file.add("layer_0/batch_1/head_0");
      },
      {":/layer_1/batch_1: missing"}, second);
}

TEST(AttentionSaverRefuses, NamesItDoesNotKnow) {
  for (const char* name :
       {"layer_00", "layer_", "layer_-1", "layer_0x", "layers", "layer_99999999999999999999"}) {
    expect_refused(
        [&](RecordedFile& file) {
          add_everything(file);
          file.add(std::string(name) + "/batch_0/head_0");
        },
        {": holds '", name, "expected layer_0, layer_1"});
  }
  expect_refused(
      [](RecordedFile& file) {
        add_everything(file);
        file.add("layer_1/batch_0/heads_2");
      },
      {":/layer_1/batch_0: holds 'heads_2'"});
}

TEST(AttentionSaverRefuses, ShapesAndTypesThatAreNoAttention) {
  // With save_statistic_only a head is [tokens, statistics].
  expect_refused(
      [](RecordedFile& file) {
        file.add("layer_0/batch_0/head_0", H5T_IEEE_F32LE, {3, 2}, kRows.data());
      },
      {":/layer_0/batch_0/head_0: found shape [3, 2], expected a square", "save_statistic_only=False"});
  expect_refused(
      [](RecordedFile& file) { file.add("layer_0/batch_0/head_0", H5T_IEEE_F32LE, {9}, kRows.data()); },
      {"found shape [9]"});
  expect_refused(
      [](RecordedFile& file) {
        add_everything(file);
        file.add("layer_2/batch_0/head_0");
        file.add("layer_2/batch_0/head_1", {1, 0, 0.5F, 0.5F});
      },
      {":/layer_2/batch_0/head_1: found shape [2, 2], expected [3, 3]"});
  const std::vector<double> doubles{1};
  expect_refused(
      [&](RecordedFile& file) {
        file.add("layer_0/batch_0/head_0", H5T_IEEE_F64LE, {1, 1}, doubles.data());
      },
      {"found float64, expected float32, float16"});
  expect_refused(
      [](RecordedFile& file) {
        file.add("layer_0/batch_0/head_0", {1, 0, 0.5F, 0.5F});
        file.add_halves("layer_0/batch_0/head_1", {0x3C00, 0, 0x3C00, 0}, 2);
      },
      {"head_1: found float16, expected float32"});
}

TEST(AttentionSaverRefuses, LinksThatLeadElsewhere) {
  expect_refused(
      [](RecordedFile& file) {
        file.add("layer_0/batch_0/head_0");
        H5Lcreate_soft("/layer_0/batch_0/head_0", file.id(), "/layer_0/batch_0/head_1", file.links(),
                       H5P_DEFAULT);
      },
      {"head_1: found a soft link"});
  expect_refused(
      [](RecordedFile& file) {
        file.add("layer_0/batch_0/head_0");
        H5Lcreate_external("other.h5", "/layer_0", file.id(), "/layer_1", file.links(), H5P_DEFAULT);
      },
      {"layer_1: found an external link"});
  // A hard link to the root makes a loop, which ends at names that belong one level higher.
  expect_refused(
      [](RecordedFile& file) {
        file.add("layer_0/batch_0/head_0");
        H5Lcreate_hard(file.id(), "/", file.id(), "/layer_1", file.links(), H5P_DEFAULT);
      },
      {":/layer_1: holds 'layer_0'"});
}

TEST(AttentionSaverRefuses, ADatasetWhereAGroupBelongs) {
  expect_refused([](RecordedFile& file) { file.add("layer_0"); }, {":/layer_0: found a dataset"});
  expect_refused([](RecordedFile& file) { file.add("layer_0/batch_0/head_0/more"); },
                 {":/layer_0/batch_0/head_0: found a group"});
}

TEST(AttentionSaverRefuses, RowsThatAreNoAttentionNamingThePlace) {
  const auto spoilt = [](std::size_t element, float value) {
    return [=](RecordedFile& file) {
      std::vector<float> rows = kRows;
      rows[element] = value;
      add_everything(file);
      file.add("layer_2/batch_0/head_0", kRows);
      file.add("layer_2/batch_0/head_1", rows);
    };
  };
  const std::string place = ":/layer_2/batch_0/head_1";
  expect_refused(spoilt(2, 0.25F), {place + "[0]: key 2 has weight 0.25, expected 0"});
  expect_refused(spoilt(6, 0.5F), {place + "[2]: sums to 1.25"});
  expect_refused(spoilt(7, -0.25F), {place + "[2]: key 1 has weight -0.25"});
  // compute_softmax=False stores logits, which are -infinity where the mask forbids.
  expect_refused(spoilt(2, -std::numeric_limits<float>::infinity()),
                 {place + "[0]: key 2 has weight -infinity", "compute_softmax=True"});
  expect_refused(spoilt(4, std::numeric_limits<float>::quiet_NaN()), {place + "[1]: key 1 has weight NaN"});
}

TEST(AttentionSaverRefuses, OptionsThatDoNotFitTheFile) {
  expect_rejected(kEverything, {"prompt is 0, expected 1 .. 3"}, of_prompt(0));
  expect_rejected(kEverything, {"prompt is 4, expected 1 .. 3"}, of_prompt(4));
  for (const Range image : {Range{2, 4}, Range{-1, 2}, Range{1, 1}, Range{2, 1}}) {
    expect_rejected(kEverything, {"image ", " is no span of the 3 tokens"}, of_prompt(2, {image}));
  }
  expect_rejected(kEverything, {"image 1:3 overlaps", "START >= 2"}, of_prompt(2, {{1, 3}, {0, 2}}));
  for (const Index kv_heads : {0, 3, -1}) {
    AttentionSaverOptions options = of_prompt(2);
    options.kv_heads = kv_heads;
    expect_rejected(kEverything, {"kv_heads is ", "divisor of the 2 query heads"}, options);
  }
  AttentionSaverOptions options = of_prompt(2);
  options.head_dim = 0;
  expect_rejected(kEverything, {"head_dim is 0"}, options);
}

}  // namespace
}  // namespace hae::traces::test
