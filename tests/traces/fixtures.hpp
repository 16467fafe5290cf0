#pragma once

#include <gtest/gtest.h>
#include <hdf5.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sim/trace.hpp"
#include "traces/details.hpp"
#include "traces/run_file.hpp"
#include "traces/trace_file.hpp"
#include "traces/trace_writer.hpp"

// Hand-sized traces, and the HDF5 C API to spoil them with.

namespace hae::traces::test {

/// A folder of a test's own, gone when the test ends.
class Scratch {
 public:
  Scratch() {
    std::string pattern = (std::filesystem::temp_directory_path() / "hae-traces-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~Scratch() { std::filesystem::remove_all(folder_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  [[nodiscard]] std::filesystem::path operator/(const std::string& name) const { return folder_ / name; }

 private:
  std::filesystem::path folder_;
};

inline std::string read_bytes(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void write_bytes(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

/// Runs with nothing measured.
inline void write_runs(const std::filesystem::path& path, const StoredRuns& stored) {
  RunWriter writer(path, stored.manifest, stored.traces);
  for (const StoredRun& run : stored.runs) {
    RunResult result;
    result.lanes = run.lanes;
    result.log = run.log;
    writer.add(run.identity, result);
  }
  writer.finish();
}

/// 2 layers, 4 query heads, 2 KV heads of 4 dimensions, 6 tokens, 4 of them prompt, an image at 1 and 2.
inline SequenceInfo small_qkv(const std::string& name = "small") {
  SequenceInfo info;
  info.name = name;
  info.group = name;
  info.payload = Payload::qkv;
  info.layers = 2;
  info.query_heads = 4;
  info.kv_heads = 2;
  info.head_dim = 4;
  info.element_bytes = 4;
  info.tokens = 6;
  info.prompt = 4;
  info.generated = 3;
  info.scale = 0.5;
  info.has_values = true;
  info.masks.resize(2);
  info.image = {-1, 0, 0, -1, -1, -1};
  info.prompt_rows = {0, 1, 2, 3};
  return info;
}

/// The same, with stored probabilities and no V.
inline SequenceInfo small_attention(const std::string& name = "small") {
  SequenceInfo info = small_qkv(name);
  info.payload = Payload::attention;
  info.has_values = false;
  return info;
}

/// A value that every stored type holds exactly, different for neighbours: multiples of 1/8 below 16, with
/// sign.
inline float exact_value(Index layer, Index array, Index head, Index element) {
  const Index code = 37 * layer + 11 * array + 5 * head + element;
  return static_cast<float>(code % 127 - 63) / 8.0F;
}

inline Index head_size(const SequenceInfo& info, LayerArray array) {
  const auto rows = static_cast<Index>(info.prompt_rows.size());
  switch (array) {
    case LayerArray::prompt:
      return rows * info.prompt;
    case LayerArray::decode:
      return info.steps() * info.prompt + info.steps() * (info.steps() + 1) / 2;
    default:
      return info.tokens * *info.head_dim;
  }
}

inline std::vector<float> exact_head(const SequenceInfo& info, LayerArray array, Index layer, Index head) {
  std::vector<float> values;
  for (Index element = 0; element < head_size(info, array); ++element) {
    values.push_back(exact_value(layer, static_cast<Index>(array), head, element));
  }
  return values;
}

inline std::vector<LayerArray> arrays_of(const SequenceInfo& info) {
  std::vector<LayerArray> arrays{LayerArray::prompt, LayerArray::decode};
  if (info.payload == Payload::qkv) {
    arrays = {LayerArray::queries, LayerArray::keys};
  }
  if (info.has_values) {
    arrays.push_back(LayerArray::values);
  }
  return arrays;
}

inline Index heads_of(const SequenceInfo& info, LayerArray array) {
  return array == LayerArray::keys || array == LayerArray::values ? info.kv_heads : info.query_heads;
}

/// Writes a sequence of exact values.
inline void write_exact(TraceWriter& writer, const SequenceInfo& info, FloatType type,
                        const SequenceDetails& details = {}) {
  writer.begin_sequence(info, details, type);
  for (Index layer = 0; layer < info.layers; ++layer) {
    for (const LayerArray array : arrays_of(info)) {
      for (Index head = 0; head < heads_of(info, array); ++head) {
        writer.write_head(layer, array, head, exact_head(info, array, layer, head));
      }
    }
  }
}

inline void write_small(const std::filesystem::path& path, const SequenceInfo& info,
                        FloatType type = FloatType::float32, const SequenceDetails& details = {}) {
  TraceWriter writer(path, {"test", "", ""});
  write_exact(writer, info, type, details);
  writer.finish();
}

/// A trace opened with the HDF5 C API, to be changed.
class RawFile {
 public:
  explicit RawFile(const std::filesystem::path& path)
      : id_(H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT)) {
    EXPECT_GE(id_, 0);
  }
  ~RawFile() { H5Fclose(id_); }
  RawFile(const RawFile&) = delete;
  RawFile& operator=(const RawFile&) = delete;

  [[nodiscard]] hid_t id() const { return id_; }

  void remove(const std::string& path) { EXPECT_GE(H5Ldelete(id_, path.c_str(), H5P_DEFAULT), 0); }

  void remove_attribute(const std::string& object, const std::string& name) {
    EXPECT_GE(H5Adelete_by_name(id_, object.c_str(), name.c_str(), H5P_DEFAULT), 0);
  }

  void set_attribute(const std::string& object, const std::string& name, Index value) {
    set(object, name, H5T_STD_I64LE, H5T_NATIVE_INT64, &value);
  }

  void set_attribute(const std::string& object, const std::string& name, const std::string& value) {
    const hid_t type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, value.size() + 1);
    set(object, name, type, type, value.c_str());
    H5Tclose(type);
  }

  /// Replaces a dataset; `data` in memory type `type`, nothing: not written.
  void replace(const std::string& path, hid_t type, const std::vector<hsize_t>& shape,
               const void* data = nullptr, hid_t properties = H5P_DEFAULT) {
    if (H5Lexists(id_, path.c_str(), H5P_DEFAULT) > 0) {
      remove(path);
    }
    const hid_t space = H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr);
    const hid_t dataset = H5Dcreate2(id_, path.c_str(), type, space, H5P_DEFAULT, properties, H5P_DEFAULT);
    EXPECT_GE(dataset, 0);
    if (data != nullptr) {
      EXPECT_GE(H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data), 0);
    }
    H5Dclose(dataset);
    H5Sclose(space);
  }

 private:
  void set(const std::string& object, const std::string& name, hid_t type, hid_t memory, const void* value) {
    if (H5Aexists_by_name(id_, object.c_str(), name.c_str(), H5P_DEFAULT) > 0) {
      remove_attribute(object, name);
    }
    const hid_t space = H5Screate(H5S_SCALAR);
    const hid_t attribute = H5Acreate_by_name(id_, object.c_str(), name.c_str(), type, space, H5P_DEFAULT,
                                              H5P_DEFAULT, H5P_DEFAULT);
    EXPECT_GE(H5Awrite(attribute, memory, value), 0);
    H5Aclose(attribute);
    H5Sclose(space);
  }

  hid_t id_;
};

inline const std::string kSequence = "/sequences/000000";
inline const std::string kLayer = kSequence + "/layers/000000";

/// Opens every sequence and every layer; the message of the TraceError that it threw, if any.
inline std::optional<std::string> refusal(const std::filesystem::path& path, OpenOptions options = {}) {
  try {
    TraceFile trace(path, options);
    for (Index index = 0; index < trace.sequences(); ++index) {
      const auto sequence = trace.open(index);
      for (Index layer = 0; layer < sequence->info().layers; ++layer) {
        (void)sequence->layer(layer);
      }
    }
  } catch (const TraceError& error) {
    return error.what();
  }
  return std::nullopt;
}

/// The file is refused in one line that begins with its name and holds every one of `words`.
inline void expect_refused(const std::filesystem::path& path, const std::vector<std::string>& words) {
  const std::optional<std::string> message = refusal(path);
  ASSERT_TRUE(message.has_value()) << path << " was accepted";
  EXPECT_EQ(message->find('\n'), std::string::npos) << *message;
  EXPECT_TRUE(message->starts_with(path.string() + ":")) << *message;
  for (const std::string& word : words) {
    EXPECT_NE(message->find(word), std::string::npos) << "'" << word << "' is not in: " << *message;
  }
}

}  // namespace hae::traces::test
