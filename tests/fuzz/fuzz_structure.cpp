// A well-formed HDF5 file whose contents are near a valid trace: HDF5 itself writes it, so every byte drives
// what our own checks see. A byte below 224 keeps what is valid.

#include <hdf5.h>

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "sim/errors.hpp"
#include "tests/fuzz/target.hpp"
#include "traces/isolated.hpp"

using namespace hae::traces::fuzz;

namespace {

/// Decisions out of the input; when it is used up, the valid one.
class Choices {
 public:
  explicit Choices(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

  unsigned byte() {
    if (bytes_.empty()) {
      return 0;
    }
    const unsigned value = bytes_.front();
    bytes_ = bytes_.subspan(1);
    return value;
  }
  bool hostile() { return byte() >= 224; }
  unsigned below(unsigned count) { return byte() % count; }
  template <typename Value>
  Value one_of(const std::vector<Value>& values) {
    return values[below(static_cast<unsigned>(values.size()))];
  }

 private:
  std::span<const std::uint8_t> bytes_;
};

using Shape = std::vector<hsize_t>;

constexpr hsize_t kTokens = 3;
constexpr hsize_t kPrompt = 2;
constexpr hsize_t kLayers = 2;

/// Any type that HDF5 can make; the caller closes it.
hid_t hostile_type(Choices& choose) {
  const hid_t base = H5Tcopy(choose.one_of<hid_t>(
      {H5T_STD_I8LE, H5T_STD_U64BE, H5T_STD_I32LE, H5T_IEEE_F32BE, H5T_IEEE_F64LE, H5T_IEEE_F32LE}));
  switch (choose.below(11)) {
    case 0: {  // an odd integer
      const hid_t type = H5Tcopy(H5T_STD_I64LE);
      H5Tset_size(type, 1 + choose.below(20));
      H5Tset_precision(type, 1 + choose.below(64));
      H5Tset_offset(type, choose.below(16));
      return type;
    }
    case 1: {  // a 16-bit float of any fields
      const hid_t type = H5Tcopy(H5T_IEEE_F32LE);
      const unsigned mantissa = 1 + choose.below(14);
      H5Tset_fields(type, 15, mantissa, 15 - mantissa, 0, mantissa);
      H5Tset_size(type, 2);
      H5Tset_ebias(type, choose.one_of<std::size_t>({15, 127, 1}));
      return type;
    }
    case 2: {
      const hid_t type = H5Tenum_create(H5T_NATIVE_INT);
      const int value = 1;
      H5Tenum_insert(type, "TRUE", &value);
      return type;
    }
    case 3: {
      const hid_t type = H5Tcreate(H5T_COMPOUND, 16);
      H5Tinsert(type, "a", 0, base);
      return type;
    }
    case 4:
      return H5Tcreate(H5T_OPAQUE, 1 + choose.below(255));
    case 5:
      return H5Tcopy(H5T_STD_REF_OBJ);
    case 6:
      return H5Tvlen_create(base);
    case 7: {
      const hsize_t extent = 1 + choose.below(5);
      return H5Tarray_create2(base, 1, &extent);
    }
    case 8: {
      const hid_t type = H5Tcopy(H5T_C_S1);
      H5Tset_size(type, choose.one_of<std::size_t>({1, 7, 60000, H5T_VARIABLE}));
      H5Tset_strpad(type, choose.one_of<H5T_str_t>({H5T_STR_NULLTERM, H5T_STR_NULLPAD, H5T_STR_SPACEPAD}));
      return type;
    }
    default:
      return base;
  }
}

hid_t hostile_space(Choices& choose) {
  if (choose.below(4) == 0) {
    return H5Screate(choose.below(2) == 0 ? H5S_NULL : H5S_SCALAR);
  }
  Shape shape(1 + choose.below(5));
  for (hsize_t& extent : shape) {
    extent = choose.one_of<hsize_t>(
        {0, 1, 2, 3, 4, 6, 1000, hsize_t{1} << 20, hsize_t{1} << 40, hsize_t{1} << 62});
  }
  return H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr);
}

/// Puts something else than an object of the trace at a name.
bool put_hostile_link(Choices& choose, hid_t file, const std::string& path) {
  switch (choose.below(8)) {
    case 0:
      return H5Lcreate_soft("/sequences", file, path.c_str(), H5P_DEFAULT, H5P_DEFAULT) >= 0;
    case 1:
      return H5Lcreate_soft("nowhere", file, path.c_str(), H5P_DEFAULT, H5P_DEFAULT) >= 0;
    case 2:
      return H5Lcreate_external("other.h5", "/", file, path.c_str(), H5P_DEFAULT, H5P_DEFAULT) >= 0;
    case 3:  // a cycle
      return H5Lcreate_hard(file, "/", file, path.c_str(), H5P_DEFAULT, H5P_DEFAULT) >= 0;
    case 4: {
      const hid_t type = hostile_type(choose);
      H5Tcommit2(file, path.c_str(), type, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
      H5Tclose(type);
      return true;
    }
    case 5:
      H5Gclose(H5Gcreate2(file, path.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
      return true;
    default:
      return true;  // missing
  }
}

/// Writes bytes of the input's choice, when there are few.
void fill(Choices& choose, hid_t dataset, hid_t type, hid_t space) {
  const hssize_t elements = H5Sget_simple_extent_npoints(space);
  const std::size_t bytes = H5Tget_size(type);
  if (elements <= 0 || elements > 4096 || bytes > 4096 || H5Tdetect_class(type, H5T_VLEN) != 0 ||
      H5Tis_variable_str(type) != 0 || H5Tget_class(type) == H5T_REFERENCE) {
    return;
  }
  std::vector<std::uint8_t> values(static_cast<std::size_t>(elements) * bytes);
  for (std::size_t i = 0; i < std::min<std::size_t>(values.size(), 64); ++i) {
    values[i] = static_cast<std::uint8_t>(choose.byte());
  }
  H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data());
}

/// One chunk as raw bytes: of any length, with any filters skipped.
void write_raw_chunk(Choices& choose, hid_t dataset, int rank) {
  std::vector<std::uint8_t> bytes(choose.one_of<std::size_t>({0, 1, 4, 12, 24, 96, 3000}));
  for (std::size_t i = 0; i < std::min<std::size_t>(bytes.size(), 40); ++i) {
    bytes[i] = static_cast<std::uint8_t>(choose.byte());
  }
  const Shape origin(static_cast<std::size_t>(rank), 0);
  H5Dwrite_chunk(dataset, H5P_DEFAULT, choose.below(8), origin.data(), bytes.size(), bytes.data());
}

hid_t hostile_layout(Choices& choose, int rank) {
  const hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
  switch (choose.below(6)) {
    case 0:
      H5Pset_layout(properties, H5D_COMPACT);
      return properties;
    case 1:
      H5Pset_external(properties, "no-such-folder/other.bin", 0, H5F_UNLIMITED);
      return properties;
    default:
      break;
  }
  Shape chunk(static_cast<std::size_t>(std::max(rank, 1)));
  for (hsize_t& extent : chunk) {
    extent = choose.one_of<hsize_t>({1, 2, 3, 4, 1000, hsize_t{1} << 20});
  }
  H5Pset_chunk(properties, static_cast<int>(chunk.size()), chunk.data());
  for (unsigned filters = choose.below(4); filters > 0; --filters) {
    switch (choose.below(5)) {
      case 0:
        H5Pset_shuffle(properties);
        break;
      case 1:
        H5Pset_deflate(properties, choose.below(10));
        break;
      case 2:
        H5Pset_fletcher32(properties);
        break;
      case 3:
        H5Pset_filter(properties, 32000, H5Z_FLAG_OPTIONAL, 0, nullptr);
        break;
      default:
        H5Pset_scaleoffset(properties, H5Z_SO_INT, 4);
        break;
    }
  }
  return properties;
}

/// What the writer of a valid trace would put there.
struct Plan {
  hid_t type;
  Shape shape;
  const void* values = nullptr;
};

hssize_t elements_of(const Shape& shape) {
  return static_cast<hssize_t>(std::accumulate(shape.begin(), shape.end(), hsize_t{1}, std::multiplies<>()));
}

void put_dataset(Choices& choose, hid_t file, const std::string& path, const Plan& plan) {
  if (choose.hostile() && put_hostile_link(choose, file, path)) {
    return;
  }
  const hid_t type = choose.hostile() ? hostile_type(choose) : H5Tcopy(plan.type);
  const hid_t space = choose.hostile()
                          ? hostile_space(choose)
                          : H5Screate_simple(static_cast<int>(plan.shape.size()), plan.shape.data(), nullptr);
  const int rank = H5Sget_simple_extent_ndims(space);
  const hid_t properties = choose.hostile() ? hostile_layout(choose, rank) : H5Pcreate(H5P_DATASET_CREATE);
  const hid_t dataset = H5Dcreate2(file, path.c_str(), type, space, H5P_DEFAULT, properties, H5P_DEFAULT);
  if (dataset >= 0) {
    if (!choose.hostile()) {
      const bool as_planned = plan.values != nullptr && H5Tequal(type, plan.type) > 0 &&
                              H5Sget_simple_extent_npoints(space) <= elements_of(plan.shape);
      as_planned ? static_cast<void>(H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, plan.values))
                 : fill(choose, dataset, type, space);
    }
    if (H5Pget_layout(properties) == H5D_CHUNKED && choose.hostile()) {
      write_raw_chunk(choose, dataset, rank);
    }
    H5Dclose(dataset);
  }
  H5Pclose(properties);
  H5Sclose(space);
  H5Tclose(type);
}

void put_attribute(Choices& choose, hid_t object, const char* name, hid_t valid_type, const void* value) {
  if (!choose.hostile()) {
    const hid_t space = H5Screate(H5S_SCALAR);
    const hid_t attribute = H5Acreate2(object, name, valid_type, space, H5P_DEFAULT, H5P_DEFAULT);
    H5Awrite(attribute, valid_type, value);
    H5Aclose(attribute);
    H5Sclose(space);
    return;
  }
  const hid_t type = hostile_type(choose);
  const hid_t space = choose.below(2) == 0 ? H5Screate(H5S_SCALAR) : hostile_space(choose);
  const hssize_t elements = H5Sget_simple_extent_npoints(space);
  if (elements >= 0 && elements < 4096 && elements * static_cast<hssize_t>(H5Tget_size(type)) < 65536) {
    const hid_t attribute = H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    if (attribute >= 0 && H5Tdetect_class(type, H5T_VLEN) == 0 && H5Tis_variable_str(type) == 0) {
      std::vector<std::uint8_t> bytes(static_cast<std::size_t>(elements) * H5Tget_size(type) + 1);
      for (std::size_t i = 0; i < std::min<std::size_t>(bytes.size(), 16); ++i) {
        bytes[i] = static_cast<std::uint8_t>(choose.byte());
      }
      H5Awrite(attribute, type, bytes.data());
    }
    H5Aclose(attribute);
  }
  H5Sclose(space);
  H5Tclose(type);
}

void put_text(Choices& choose, hid_t object, const char* name, const std::string& text) {
  const hid_t type = H5Tcopy(H5T_C_S1);
  H5Tset_size(type, text.size() + 1);
  put_attribute(choose, object, name, type, text.c_str());
  H5Tclose(type);
}

/// An integer that is right, or wrong and still an integer.
void put_count(Choices& choose, hid_t object, const char* name, std::int64_t value) {
  if (choose.hostile()) {
    value = choose.one_of<std::int64_t>(
        {-1, 0, 1, 2, 3, 5, 1 << 20, INT64_MAX, INT64_MIN, std::int64_t{1} << 31});
  }
  put_attribute(choose, object, name, H5T_NATIVE_INT64, &value);
}

hid_t put_group(Choices& choose, hid_t file, const std::string& path) {
  if (choose.hostile() && put_hostile_link(choose, file, path)) {
    return H5Gopen2(file, "/", H5P_DEFAULT);  // what would go into it goes somewhere
  }
  const hid_t group = H5Gcreate2(file, path.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
  return group >= 0 ? group : H5Gopen2(file, "/", H5P_DEFAULT);
}

void put_layer(Choices& choose, hid_t file, const std::string& path, bool attention) {
  H5Gclose(put_group(choose, file, path));
  static const std::vector<float> values(32, 0.0F);
  const auto put = [&](const char* name, const Shape& shape) {
    put_dataset(choose, file, path + "/" + name, {H5T_IEEE_F32LE, shape, values.data()});
  };
  if (attention) {
    put("prompt", {2, kPrompt, kPrompt});
    put("decode", {2, kTokens});
  } else {
    put("q", {2, kTokens, 4});
    put("k", {1, kTokens, 4});
    put("v", {1, kTokens, 4});
  }
  if (choose.byte() % 8 == 7) {
    put("q_unrotated", {2, kTokens, 4});
  }
}

void put_optional(Choices& choose, hid_t file, const std::string& path) {
  static const std::array<std::int64_t, 6> none{-1, -1, -1, -1, -1, -1};
  static const std::array<std::int64_t, 6> zeros{};
  static const std::array<std::int64_t, 2> rows{0, 1};
  static const std::array<double, 4> reals{};
  static const std::array<std::uint8_t, 4> pixels{};
  const auto wanted = [&] { return choose.byte() % 4 == 3; };
  const auto put = [&](const char* name, const Plan& plan) {
    if (wanted()) {
      put_dataset(choose, file, path + "/" + name, plan);
    }
  };
  put("frame", {H5T_NATIVE_INT64, {kTokens}, none.data()});
  put("patch", {H5T_NATIVE_INT64, {kTokens, 2}, none.data()});
  put("position", {H5T_NATIVE_INT64, {kTokens}, zeros.data()});
  put("token_id", {H5T_NATIVE_INT64, {kTokens}, zeros.data()});
  put("window", {H5T_NATIVE_INT64, {kLayers}, zeros.data()});
  put("bidirectional", {H5T_NATIVE_INT64, {kLayers}, zeros.data()});
  put("prompt_rows", {H5T_NATIVE_INT64, {kPrompt}, rows.data()});
  put("embedding_similarity", {H5T_IEEE_F64LE, {1, 1}, reals.data()});
  const hid_t text = H5Tcopy(H5T_C_S1);
  H5Tset_size(text, 4);
  put("token", {text, {kTokens}, zeros.data()});
  H5Tclose(text);
  if (wanted()) {
    const hid_t rotary = put_group(choose, file, path + "/rotary");
    put_count(choose, rotary, "interleaved", 0);
    H5Gclose(rotary);
    put_dataset(choose, file, path + "/rotary/inverse_frequency", {H5T_IEEE_F64LE, {2}, reals.data()});
  }
  if (wanted()) {
    H5Gclose(put_group(choose, file, path + "/pictures"));
    put_dataset(choose, file, path + "/pictures/0", {H5T_STD_U8LE, {2, 2}, pixels.data()});
  }
}

void put_sequence(Choices& choose, hid_t file, const std::string& path, const std::string& name) {
  static const std::array<std::int64_t, kTokens> modality{0, 1, 0};
  static const std::array<std::int64_t, kTokens> image{-1, 0, -1};
  const hid_t sequence = put_group(choose, file, path);
  const bool attention = choose.byte() % 2 == 1;
  put_text(choose, sequence, "name", name);
  put_text(choose, sequence, "payload", attention ? "attention" : "qkv");
  put_count(choose, sequence, "layers", kLayers);
  put_count(choose, sequence, "query_heads", 2);
  put_count(choose, sequence, "kv_heads", 1);
  put_count(choose, sequence, "head_dim", 4);
  put_count(choose, sequence, "tokens", kTokens);
  put_count(choose, sequence, "prompt", kPrompt);
  put_count(choose, sequence, "generated", 2);
  const double scale = 0.5;
  put_attribute(choose, sequence, "scale", H5T_NATIVE_DOUBLE, &scale);
  if (choose.byte() % 4 == 3) {
    put_text(choose, sequence, "group", "a\nb");
    put_text(choose, sequence, "model", "m");
    put_count(choose, sequence, "element_bytes", 2);
  }
  H5Gclose(sequence);
  put_dataset(choose, file, path + "/modality", {H5T_NATIVE_INT64, {kTokens}, modality.data()});
  put_dataset(choose, file, path + "/image", {H5T_NATIVE_INT64, {kTokens}, image.data()});
  put_optional(choose, file, path);
  H5Gclose(put_group(choose, file, path + "/layers"));
  for (hsize_t layer = 0; layer < kLayers; ++layer) {
    put_layer(choose, file, path + "/layers/00000" + std::to_string(layer), attention);
  }
}

void write_file(Choices& choose, const std::filesystem::path& path) {
  const hid_t access = H5Pcreate(H5P_FILE_ACCESS);
  const hid_t creation = H5Pcreate(H5P_FILE_CREATE);
  if (choose.hostile()) {
    H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110);
  }
  if (choose.hostile()) {
    H5Pset_userblock(creation, 512);
  }
  const hid_t file = H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation, access);
  const hid_t root = H5Gopen2(file, "/", H5P_DEFAULT);
  put_text(choose, root, "format", "hae-trace");
  put_count(choose, root, "version", 1);
  put_count(choose, root, "complete", 1);
  H5Gclose(root);
  H5Gclose(put_group(choose, file, "/sequences"));
  put_sequence(choose, file, "/sequences/000000", "first");
  if (choose.byte() % 4 == 3) {
    put_sequence(choose, file, "/sequences/000001", choose.hostile() ? "first" : "second");
  }
  H5Fclose(file);
  H5Pclose(creation);
  H5Pclose(access);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  const ScratchFile file("structure.h5");
  Choices choose({data, size});
  try {
    // HDF5 also crashes while it writes what some choices ask for: such a file is nobody's.
    hae::traces::rehearse("writing", 0, [&] { write_file(choose, file.path()); });
  } catch (const hae::TraceError&) {
    return 0;
  }
  expect_sound([&] { read_trace(file.path()); });
  return 0;
}
