#include "traces/run_file.hpp"

#include <cmath>
#include <functional>
#include <limits>

#include "tests/traces/fixtures.hpp"
#include "traces/hdf5.hpp"

namespace hae::traces::test {
namespace {

StoredRuns two_runs() {
  StoredRun first;
  first.identity = {1, 3, "a dog", "hae:budget=8", {{"budget", "8"}, {"bin", "15%"}, {"alpha", ""}}};
  first.log.entries = {
      {0, 0, kLayerLane, 5, false, 0.1, std::nullopt, std::nullopt},
      {0, 1, kLayerLane, 5, true, 0.1, std::nullopt, std::nullopt},
      {2, 0, kLayerLane, 4, false, std::numeric_limits<double>::denorm_min(), 1, Merge{3, 0.25, 0.75, 2.0}},
      {3, 0, kLayerLane, 6, false, std::nullopt, 3, std::nullopt}};
  first.log.pending = {{1, kLayerLane, 7, 3}};
  StoredRun second;
  second.identity.policy = "full";
  second.lanes = LaneKind::kv_head;
  return {"{\"command\": \"hae\"}",
          {{"cat.h5", std::string(64, 'b')}, {"dog.h5", std::string(64, 'a')}},
          {first, second}};
}

void expect_spoilt(const std::function<void(RawFile&)>& spoil, const std::vector<std::string>& words) {
  const Scratch scratch;
  const std::filesystem::path path = scratch / "run.h5";
  write_runs(path, two_runs());
  {
    RawFile raw(path);
    spoil(raw);
  }
  try {
    (void)read_runs(path);
    ADD_FAILURE() << "accepted";
  } catch (const TraceError& error) {
    for (const std::string& word : words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  }
}

TEST(RunFile, KeepsRunsTheirOptionsAndTheirLogs) {
  const Scratch scratch;
  write_runs(scratch / "run.h5", two_runs());
  EXPECT_EQ(read_runs(scratch / "run.h5"), two_runs());
  EXPECT_FALSE(std::filesystem::exists(scratch / "run.h5.partial"));
}

TEST(RunFile, GivesTheSameBytesForTheSameRuns) {
  const Scratch scratch;
  write_runs(scratch / "a.h5", two_runs());
  write_runs(scratch / "b.h5", two_runs());
  EXPECT_EQ(read_bytes(scratch / "a.h5"), read_bytes(scratch / "b.h5"));
}

// One layer, two query heads, two steps, one lane; the series a, b per head and step.
TEST(RunFile, KeepsWhatWasMeasuredInEachStep) {
  const Scratch scratch;
  RunResult result;
  result.decode = Series(1, 2, 2);
  result.decode.at(Metric::missed_mass, 0, 1, 0) = 0.25;
  result.attention_tokens = {5, 6};
  result.top_now = {0.5, 0.125, 0.0, 1.0};
  RunWriter writer(scratch / "run.h5", "{}", {{"cat.h5", std::string(64, 'b')}});
  writer.add({0, 0, "cat", "full", {}}, result);
  writer.finish();
  const hdf5::File file(scratch / "run.h5", true, false);
  const hdf5::Group run = file.root().group("runs").group("000000");
  const hdf5::Dataset missed = run.group("decode").dataset("missed_mass", hdf5::Content::reals);
  EXPECT_EQ(missed.shape(), (std::vector<Index>{1, 2, 2}));
  EXPECT_EQ(missed.read_reals().at(2), 0.25);
  EXPECT_TRUE(std::isnan(missed.read_reals().at(3)));
  EXPECT_EQ(run.dataset("attention_tokens", hdf5::Content::integers).shape(), (std::vector<Index>{1, 1, 2}));
  EXPECT_EQ(run.dataset("top_now", hdf5::Content::reals).read_reals(), result.top_now);
  EXPECT_FALSE(run.has("prefill"));
}

TEST(RunFile, AWriterThatStopsLeavesNothing) {
  const Scratch scratch;
  { RunWriter writer(scratch / "run.h5", "{}", {{"cat.h5", std::string(64, 'b')}}); }
  EXPECT_TRUE(std::filesystem::is_empty(scratch / ""));
}

TEST(RunFile, IsNotATrace) {
  const Scratch scratch;
  write_runs(scratch / "run.h5", two_runs());
  expect_refused(scratch / "run.h5", {"not a trace"});
  write_small(scratch / "trace.h5", small_qkv());
  EXPECT_THROW((void)read_runs(scratch / "trace.h5"), TraceError);
}

TEST(RunFile, RefusesWhatIsMissingUnfinishedOrOfAnotherVersion) {
  expect_spoilt([](RawFile& raw) { raw.remove_attribute("/", "complete"); }, {"unfinished"});
  expect_spoilt([](RawFile& raw) { raw.set_attribute("/", "version", 3); }, {"version 3, expected 2"});
  expect_spoilt([](RawFile& raw) { raw.remove("/runs/000000/log/token"); }, {"/log/token: missing"});
  expect_spoilt([](RawFile& raw) { raw.remove("/runs/000000/option_key"); }, {"/option_key: missing"});
  expect_spoilt([](RawFile& raw) { raw.set_attribute("/runs/000001", "lanes", "head"); },
                {"lanes is 'head'"});
  expect_spoilt([](RawFile& raw) { raw.set_attribute("/runs/000001", "trace", 2); },
                {"trace is 2, expected 0 .. 1"});
}

TEST(RunFile, RefusesColumnsThatDisagreeOrAreOutOfRange) {
  const std::vector<Index> values{0, 0, -2, 0};
  const auto replace = [&](const char* name, hsize_t rows) {
    return [&values, name, rows](RawFile& raw) {
      raw.replace(std::string("/runs/000000/log/") + name, H5T_NATIVE_INT64, {rows}, values.data());
    };
  };
  expect_spoilt(replace("token", 3), {"/log/token: found shape [3], expected [entries] = [4]"});
  expect_spoilt(replace("token", 4), {"/log/token[2]: found -2, expected at least 0"});
  expect_spoilt(replace("lane", 4), {"/log/lane[2]: found -2"});
  expect_spoilt(replace("within", 4), {"/log/within[2]: found -2, expected at least 0 and at most 1"});
}

}  // namespace
}  // namespace hae::traces::test
