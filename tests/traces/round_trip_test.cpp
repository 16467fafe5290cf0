#include <array>
#include <fstream>
#include <limits>
#include <thread>

#include "tests/traces/fixtures.hpp"

namespace hae::traces::test {
namespace {

View<float, 3> view(std::vector<float>& memory, Index a, Index b, Index c) {
  memory.assign(static_cast<std::size_t>(a * b * c), 0);
  return {memory.data(), {a, b, c}};
}

void expect_info(const SequenceInfo& found, const SequenceInfo& written) {
  EXPECT_EQ(found.name, written.name);
  EXPECT_EQ(found.group, written.group);
  EXPECT_EQ(found.payload, written.payload);
  EXPECT_EQ(found.layers, written.layers);
  EXPECT_EQ(found.query_heads, written.query_heads);
  EXPECT_EQ(found.kv_heads, written.kv_heads);
  EXPECT_EQ(found.head_dim, written.head_dim);
  EXPECT_EQ(found.element_bytes, written.element_bytes);
  EXPECT_EQ(found.tokens, written.tokens);
  EXPECT_EQ(found.prompt, written.prompt);
  EXPECT_EQ(found.generated, written.generated);
  EXPECT_EQ(found.scale, written.scale);
  EXPECT_EQ(found.has_values, written.has_values);
  EXPECT_EQ(found.masks, written.masks);
  EXPECT_EQ(found.image, written.image);
  EXPECT_EQ(found.prompt_rows, written.prompt_rows);
}

/// array [heads, rows, width] holds rows `first`.. of the exact values of each head.
void expect_exact(View<const float, 3> array, const SequenceInfo& info, LayerArray kind, Index layer,
                  Index first) {
  for (Index head = 0; head < array.extent(0); ++head) {
    const std::vector<float> expected = exact_head(info, kind, layer, head);
    for (Index row = 0; row < array.extent(1); ++row) {
      for (Index column = 0; column < array.extent(2); ++column) {
        ASSERT_EQ(array[head][row][column],
                  expected[static_cast<std::size_t>((first + row) * array.extent(2) + column)])
            << "layer " << layer << " head " << head << " row " << first + row;
      }
    }
  }
}

/// Reads a whole layer, in all partitions into blocks of one size.
void expect_exact_layer(LayerPayload& payload, const SequenceInfo& info, Index layer) {
  std::vector<float> memory;
  if (info.payload == Payload::qkv) {
    expect_exact(payload.keys(), info, LayerArray::keys, layer, 0);
    for (Index block = 1; block <= info.tokens; ++block) {
      for (Index begin = 0; begin < info.tokens; begin += block) {
        const Range rows{begin, std::min(info.tokens, begin + block)};
        const View<float, 3> out = view(memory, info.query_heads, rows.size(), *info.head_dim);
        payload.read_queries(rows, out);
        expect_exact(out, info, LayerArray::queries, layer, begin);
      }
    }
  } else {
    const auto stored = static_cast<Index>(info.prompt_rows.size());
    for (Index begin = 0; begin < stored; begin += 2) {
      const Range rows{begin, std::min(stored, begin + 2)};
      const View<float, 3> out = view(memory, info.query_heads, rows.size(), info.prompt);
      payload.read_prompt_attention(rows, out);
      expect_exact(out, info, LayerArray::prompt, layer, begin);
    }
    Index offset = 0;
    for (Index step = 1; step <= info.steps(); ++step) {
      memory.assign(static_cast<std::size_t>(info.query_heads * (info.prompt + step)), 0);
      const View<float, 2> out(memory.data(), {info.query_heads, info.prompt + step});
      payload.read_decode_attention(step, out);
      for (Index head = 0; head < info.query_heads; ++head) {
        const std::vector<float> expected = exact_head(info, LayerArray::decode, layer, head);
        for (Index key = 0; key < info.prompt + step; ++key) {
          ASSERT_EQ(out[head][key], expected[static_cast<std::size_t>(offset + key)]) << "step " << step;
        }
      }
      offset += info.prompt + step;
    }
  }
  EXPECT_EQ(payload.values().empty(), !info.has_values);
  if (info.has_values) {
    expect_exact(payload.values(), info, LayerArray::values, layer, 0);
  }
}

void expect_exact_sequence(TraceFile& trace, Index index, const SequenceInfo& written) {
  const std::unique_ptr<Sequence> sequence = trace.open(index);
  expect_info(sequence->info(), written);
  for (Index layer = 0; layer < written.layers; ++layer) {
    expect_exact_layer(*sequence->layer(layer), written, layer);
  }
}

/// Every kind of sequence version 1 knows.
std::vector<SequenceInfo> all_kinds() {
  SequenceInfo windowed = small_qkv("qkv, windows and images");
  windowed.group = "a picture";
  windowed.masks = {{3, MaskRule::Bidirectional::image}, {2, MaskRule::Bidirectional::image_in_window}};
  windowed.image = {0, 7, 7, 0, -1, 3};  // interleaved, and one that was generated
  SequenceInfo text_only = small_qkv("text only");
  text_only.image.assign(6, -1);
  SequenceInfo image_only = small_qkv("image only, no decode steps");
  image_only.tokens = 4;
  image_only.generated = 0;
  image_only.image = {0, 0, 0, 0};
  SequenceInfo with_values = small_attention("attention with v");
  with_values.has_values = true;
  SequenceInfo subset = small_attention("attention, some prompt rows, nothing in bytes");
  subset.prompt_rows = {0, 3};
  subset.head_dim.reset();
  subset.element_bytes.reset();
  SequenceInfo empty = small_attention("attention, no rows at all");
  empty.tokens = 4;
  empty.image.resize(4);
  empty.prompt_rows.clear();
  SequenceInfo one = small_qkv("one token, one head, one dimension");
  one.layers = one.query_heads = one.kv_heads = one.tokens = one.prompt = one.generated = 1;
  one.head_dim = 1;
  one.masks.resize(1);
  one.image = {-1};
  one.prompt_rows = {0};
  return {windowed, text_only, image_only, with_values, small_attention("attention"), subset, empty, one};
}

TEST(RoundTrip, KeepsEveryKindOfSequenceInEveryTypeInOneFile) {
  const Scratch scratch;
  for (const FloatType type : {FloatType::float32, FloatType::float16, FloatType::bfloat16}) {
    const std::filesystem::path path = scratch / "trace.h5";
    const std::vector<SequenceInfo> kinds = all_kinds();
    TraceWriter writer(path, {"test 1", "hdf5 1.10.8", "a command"});
    for (const SequenceInfo& info : kinds) {
      write_exact(writer, info, type);
    }
    writer.finish();
    for (const bool memory_map : {true, false}) {
      TraceFile trace(path, {.memory_map = memory_map});
      EXPECT_EQ(trace.origin(), (TraceOrigin{"test 1", "hdf5 1.10.8", "a command"}));
      ASSERT_EQ(trace.sequences(), static_cast<Index>(kinds.size()));
      for (Index index = 0; index < trace.sequences(); ++index) {
        expect_exact_sequence(trace, index, kinds[static_cast<std::size_t>(index)]);
        EXPECT_EQ(trace.open(index)->info().row_sum_tolerance,
                  kinds[static_cast<std::size_t>(index)].payload == Payload::attention
                      ? row_sum_tolerance(type)
                      : 1e-4);
      }
    }
  }
}

TEST(RoundTrip, KeepsDetails) {
  SequenceDetails details;
  details.model = "a model";
  details.attention_implementation = "eager";
  details.frame = {-1, 0, 1, -1, -1, -1};
  details.patch = {{-1, -1}, {0, 0}, {0, 1}, {-1, -1}, {-1, -1}, {-1, -1}};
  details.position = {0, 1, 1, 2, 3, 4};
  details.token_id = {5, 9, 9, 6, 7, 8};
  details.token = {"A", "<image>", "<image>", " b\xC3\xA9", "", "."};
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv(), FloatType::float32, details);
  EXPECT_EQ(TraceFile(scratch / "trace.h5").details(0), details);
  details.position = {0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 4, 4};
  details.position_axes = 3;
  write_small(scratch / "trace.h5", small_qkv(), FloatType::float32, details);
  EXPECT_EQ(TraceFile(scratch / "trace.h5").details(0), details);
  write_small(scratch / "trace.h5", small_qkv());
  EXPECT_EQ(TraceFile(scratch / "trace.h5").details(0), SequenceDetails{});
}

TEST(RoundTrip, RoundsToNearestEvenAndNotAsHdf5Does) {
  const Scratch scratch;
  SequenceInfo info = small_qkv();
  info.layers = info.query_heads = info.kv_heads = info.tokens = info.prompt = 1;
  info.masks.resize(1);
  info.image = {-1};
  info.prompt_rows = {0};
  TraceWriter writer(scratch / "trace.h5", {});
  writer.begin_sequence(info, {}, FloatType::float16);
  const std::vector<float> hard{0.124999993F, 1.5249285751529568e-05F, 65519.0F, -2049.0F};
  for (const LayerArray array : arrays_of(info)) {
    writer.write_head(0, array, 0, hard);
  }
  writer.finish();
  TraceFile trace(scratch / "trace.h5");
  const auto layer = trace.open(0)->layer(0);
  const std::span<const float> found = layer->keys()[0][0].span();
  // 2049 lies half way between 2048 and 2050, whose significands are 1024 and 1025: even is 2048.
  EXPECT_EQ(std::vector(found.begin(), found.end()),
            (std::vector{0.125F, 1.52587890625e-05F, 65504.0F, -2048.0F}));
}

TEST(TraceWriter, GivesTheSameBytesForTheSameCalls) {
  const Scratch scratch;
  write_small(scratch / "a.h5", small_qkv());
  write_small(scratch / "b.h5", small_qkv());
  EXPECT_EQ(read_bytes(scratch / "a.h5"), read_bytes(scratch / "b.h5"));
}

TEST(TraceWriter, LeavesTheTargetAloneUntilItIsFinished) {
  const Scratch scratch;
  write_bytes(scratch / "trace.h5", "what was there");
  {
    TraceWriter writer(scratch / "trace.h5", {});
    writer.begin_sequence(small_qkv(), {}, FloatType::float32);
    EXPECT_TRUE(std::filesystem::exists(scratch / "trace.h5.partial"));
    EXPECT_THROW(writer.finish(), ContractViolation);  // not one head was written
  }
  EXPECT_EQ(read_bytes(scratch / "trace.h5"), "what was there");
  EXPECT_FALSE(std::filesystem::exists(scratch / "trace.h5.partial"));
  write_small(scratch / "trace.h5", small_qkv());
  EXPECT_EQ(refusal(scratch / "trace.h5"), std::nullopt);
  EXPECT_FALSE(std::filesystem::exists(scratch / "trace.h5.partial"));
}

TEST(TraceWriter, ReplacesWhatAKilledWriterLeft) {
  const Scratch scratch;
  write_bytes(scratch / "trace.h5.partial", "half a file");
  write_small(scratch / "trace.h5", small_qkv());
  EXPECT_EQ(refusal(scratch / "trace.h5"), std::nullopt);
}

TEST(TraceWriter, RefusesAFolderItCannotWriteTo) {
  const Scratch scratch;
  EXPECT_THROW(TraceWriter(scratch / "missing/trace.h5", {}), OutputError);
}

TEST(TraceWriter, RefusesCallsThatDoNotFit) {
  const Scratch scratch;
  const SequenceInfo info = small_qkv();
  const std::vector<float> head = exact_head(info, LayerArray::queries, 0, 0);
  TraceWriter writer(scratch / "trace.h5", {});
  EXPECT_THROW(writer.finish(), ContractViolation);  // a trace holds at least one sequence
  EXPECT_THROW(writer.write_head(0, LayerArray::queries, 0, head), ContractViolation);
  writer.begin_sequence(info, {}, FloatType::float32);
  EXPECT_THROW(writer.write_head(2, LayerArray::queries, 0, head), ContractViolation);
  EXPECT_THROW(writer.write_head(0, LayerArray::keys, 2, head), ContractViolation);
  EXPECT_THROW(writer.write_head(0, LayerArray::prompt, 0, head), ContractViolation);
  EXPECT_THROW(writer.write_head(0, LayerArray::queries, 0, std::span(head).first(3)), ContractViolation);
  writer.write_head(0, LayerArray::queries, 0, head);
  EXPECT_THROW(writer.write_head(0, LayerArray::queries, 0, head), ContractViolation);
}

TEST(TraceWriter, RefusesTwoSequencesOfOneName) {
  const Scratch scratch;
  TraceWriter writer(scratch / "trace.h5", {});
  write_exact(writer, small_qkv("same"), FloatType::float32);
  EXPECT_THROW(writer.begin_sequence(small_qkv("same"), {}, FloatType::float32), ContractViolation);
}

TEST(TraceWriter, AlignsPayloadOf4KiBTo64Bytes) {
  const Scratch scratch;
  SequenceInfo info = small_qkv();
  info.head_dim = 256;  // 2 KV heads * 6 tokens * 256 * 4 bytes = 12 KiB
  write_small(scratch / "trace.h5", info);
  const RawFile raw(scratch / "trace.h5");
  for (const char* name : {"/q", "/k", "/v"}) {
    const hid_t dataset = H5Dopen2(raw.id(), (kLayer + name).c_str(), H5P_DEFAULT);
    EXPECT_EQ(H5Dget_offset(dataset) % 64, 0u) << name;
    H5Dclose(dataset);
  }
}

TEST(TraceFile, ShowsFloat32OfTheMappedFileWithoutACopy) {
  const Scratch scratch;
  SequenceInfo info = small_qkv();
  info.head_dim = 256;
  write_small(scratch / "trace.h5", info);
  TraceFile trace(scratch / "trace.h5");
  const auto layer = trace.open(0)->layer(1);
  const auto address = reinterpret_cast<std::uintptr_t>(layer->keys().data());
  std::ifstream maps("/proc/self/maps");
  std::string line;
  bool found = false;
  while (std::getline(maps, line)) {
    unsigned long begin = 0;
    unsigned long end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) == 2 && begin <= address && address < end) {
      found = line.ends_with((scratch / "trace.h5").string());
    }
  }
  EXPECT_TRUE(found);
}

TEST(TraceFile, OutlivedByItsSequencesAndLayers) {
  const Scratch scratch;
  const SequenceInfo info = small_qkv();
  write_small(scratch / "trace.h5", info);
  std::unique_ptr<LayerPayload> layer;
  {
    TraceFile trace(scratch / "trace.h5");
    layer = trace.open(0)->layer(1);
  }
  expect_exact_layer(*layer, info, 1);
}

TEST(TraceFile, IsReadByManyThreads) {
  const Scratch scratch;
  const SequenceInfo info = small_qkv();
  write_small(scratch / "trace.h5", info);
  TraceFile trace(scratch / "trace.h5", {.memory_map = false});
  const auto sequence = trace.open(0);
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int repeat = 0; repeat < 20; ++repeat) {
        expect_exact_layer(*sequence->layer(repeat % 2), info, repeat % 2);
      }
    });
  }
}

TEST(TraceFile, ShowsEmbeddingSimilaritiesWithLayerZero) {
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv());
  const std::string path = "/sequences/000000/embedding_similarity";
  const auto open = [&] { return TraceFile(scratch / "trace.h5").open(0); };
  EXPECT_FALSE(open()->info().has_embedding_similarity);
  EXPECT_TRUE(open()->layer(0)->embedding_similarity().empty());

  std::array<float, 4> numbers{0.5F, -1.0F, 2.0F, 0.25F};  // tokens 1 and 2 by tokens 0 and 3
  RawFile(scratch / "trace.h5").replace(path, H5T_NATIVE_FLOAT, {2, 2}, numbers.data());
  {
    const auto sequence = open();
    EXPECT_TRUE(sequence->info().has_embedding_similarity);
    const auto layer = sequence->layer(0);
    const View<const double, 2> shown = layer->embedding_similarity();
    EXPECT_EQ(shown.extent(0), 2);
    EXPECT_EQ(shown.extent(1), 2);
    EXPECT_TRUE(std::equal(numbers.begin(), numbers.end(), shown.data()));
    EXPECT_TRUE(sequence->layer(1)->embedding_similarity().empty());
  }

  numbers[2] = std::numeric_limits<float>::infinity();
  RawFile(scratch / "trace.h5").replace(path, H5T_NATIVE_FLOAT, {2, 2}, numbers.data());
  EXPECT_THROW(open()->layer(0)->embedding_similarity(), TraceError);
}

TEST(TraceFile, RefusesToReadWhatAPayloadHasNot) {
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv());
  TraceFile trace(scratch / "trace.h5");
  const auto layer = trace.open(0)->layer(0);
  std::vector<float> memory;
  EXPECT_THROW(layer->read_prompt_attention({0, 1}, view(memory, 4, 1, 4)), ContractViolation);
  EXPECT_THROW(layer->read_queries({0, 7}, view(memory, 4, 7, 4)), ContractViolation);
  EXPECT_THROW(layer->read_queries({0, 2}, view(memory, 4, 1, 4)), ContractViolation);
  EXPECT_THROW((void)trace.open(1), ContractViolation);
}

}  // namespace
}  // namespace hae::traces::test
