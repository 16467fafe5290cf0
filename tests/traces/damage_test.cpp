#include <sys/resource.h>

#include <array>

#include "tests/traces/fixtures.hpp"
#include "traces/check.hpp"
#include "traces/describe.hpp"
#include "traces/isolated.hpp"
#include "traces/run_file.hpp"

// Damage of every byte: a file is refused in one line or read, and this process lives to say so.

namespace hae::traces::test {
namespace {

/// One layer of one head of one dimension: little payload, so that nearly every byte is metadata.
SequenceInfo tiny() {
  SequenceInfo info = small_qkv("tiny");
  info.layers = info.query_heads = info.kv_heads = 1;
  info.head_dim = 1;
  info.masks.resize(1);
  return info;
}

struct Outcomes {
  Index read = 0;
  Index refused = 0;
};

/// Reads everything of a damaged file.
template <typename Read>
void count(Outcomes& outcomes, Read read) {
  try {
    read();
    ++outcomes.read;
  } catch (const TraceError& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    ++outcomes.refused;
  }
}

/// No child took more memory than metadata may. This program and its libraries take less than 256 MiB.
void expect_children_within_limit() {
  rusage children{};
  ASSERT_EQ(::getrusage(RUSAGE_CHILDREN, &children), 0);
  if (kMemoryIsBounded) {
    EXPECT_LE(Index{children.ru_maxrss} * 1024, kMetadataBytes + (Index{1} << 28));
  }
}

/// `read` meets the file with one byte changed: bytes first, first + stride, ... of those that are not zero,
/// of which there are few, and every 16th of the others.
template <typename Read>
Outcomes flip_bytes(const std::filesystem::path& path, std::size_t first, std::size_t stride, Read read) {
  const std::string whole = read_bytes(path);
  Outcomes outcomes;
  for (std::size_t at = first; at < whole.size(); at += stride) {
    if (whole[at] == 0 && at / stride % 32 != 0) {
      continue;
    }
    constexpr std::array<int, 4> kMasks{0x01, 0xFF, 0x80, 0x10};
    std::string bytes = whole;
    bytes[at] = static_cast<char>(bytes[at] ^ kMasks[at / stride % kMasks.size()]);
    write_bytes(path, bytes);
    count(outcomes, read);
  }
  expect_children_within_limit();
  return outcomes;
}

constexpr std::size_t kShards = 8;

class EveryByte : public testing::TestWithParam<std::size_t> {};

TEST_P(EveryByte, OfATraceChangedIsRefusedOrRead) {
  const Scratch scratch;
  write_small(scratch / "trace.h5", tiny());
  const Outcomes outcomes = flip_bytes(scratch / "trace.h5", GetParam(), kShards, [&] {
    TraceFile trace(scratch / "trace.h5");
    static_cast<void>(describe(trace));
    static_cast<void>(check_trace(trace));
  });
  EXPECT_GT(outcomes.read, 0);  // a number of the payload, a character of a name
  EXPECT_GT(outcomes.refused, 0);
}

TEST_P(EveryByte, OfARunFileChangedIsRefusedOrRead) {
  const Scratch scratch;
  StoredRun run;
  run.identity = {0, 0, "tiny", "full", {{"budget", "8"}}};
  run.log.entries = {{0, 0, kLayerLane, 1, false, 0.5, std::nullopt, std::nullopt}};
  write_runs(scratch / "run.h5", {"{}", {{"trace.h5", std::string(64, 'a')}}, {run}});
  const Outcomes outcomes = flip_bytes(scratch / "run.h5", GetParam(), 2 * kShards,
                                       [&] { static_cast<void>(read_runs(scratch / "run.h5")); });
  EXPECT_GT(outcomes.read, 0);
  EXPECT_GT(outcomes.refused, 0);
}

INSTANTIATE_TEST_SUITE_P(Damage, EveryByte, testing::Range(std::size_t{0}, kShards));

TEST(Damage, EveryTruncationAtAPageIsRefused) {
  const Scratch scratch;
  SequenceInfo info = small_qkv();
  info.head_dim = 256;
  write_small(scratch / "whole.h5", info);
  const std::string whole = read_bytes(scratch / "whole.h5");
  ASSERT_GT(whole.size(), 20u * 4096);
  EXPECT_EQ(refusal(scratch / "whole.h5"), std::nullopt);
  for (std::size_t size = 4096; size < whole.size(); size += 4096) {
    write_bytes(scratch / "trace.h5", std::string_view(whole).substr(0, size));
    expect_refused(scratch / "trace.h5", {"truncated"});
  }
}

TEST(Damage, OfOneSequenceLeavesTheOthersReadable) {
  const Scratch scratch;
  {
    TraceWriter writer(scratch / "trace.h5", {});
    for (const char* name : {"a", "b", "c", "d", "e", "f"}) {
      write_exact(writer, small_qkv(name), FloatType::float32);
    }
    writer.finish();
    RawFile(scratch / "trace.h5").remove("/sequences/000004/layers/000000/q");
  }
  TraceFile trace(scratch / "trace.h5");
  for (Index index = 0; index < 6; ++index) {
    if (index == 4) {
      EXPECT_THROW((void)trace.open(index), TraceError);
    } else {
      EXPECT_EQ(trace.open(index)->info().name, std::string(1, static_cast<char>('a' + index)));
    }
  }
}

}  // namespace
}  // namespace hae::traces::test
