#include "traces/hdf5.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>

#include "traces/message.hpp"

namespace hae::traces::hdf5 {
namespace {

/// What to do about a reason of the library's: a version it does not know is not damage.
std::string_view remedy_for(const std::string& reason) {
  if (reason.find("version number") != std::string::npos) {
    return "it was written for a newer HDF5 than 1.10: write it again with libver=('earliest', 'v110')";
  }
  return "it is damaged: copy or record it again";
}

std::mutex& library_mutex() {
  static std::mutex mutex;
  return mutex;
}

/// How many guards this thread has. A recursive mutex would not know its owner again in a child process.
thread_local int guards = 0;

/// Whether the library's latest failure began with too little memory.
bool lacked_memory() {
  bool lacked = false;
  const auto look = [](unsigned, const H5E_error2_t* error, void* out) -> herr_t {
    *static_cast<bool*>(out) |= error->maj_num == H5E_RESOURCE || error->min_num == H5E_CANTALLOC;
    return 0;
  };
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, look, &lacked);
  return lacked;
}

/// Turns a failed call of the library into a TraceError, or into bad_alloc.
template <typename Status>
Status checked(Status status, const std::string& where, const char* doing) {
  if (status < 0) {
    if (lacked_memory()) {
      throw std::bad_alloc();
    }
    refuse(where, ": cannot ", doing, " (", library_reason(), "); ", remedy_for(library_reason()));
  }
  return status;
}

Index product(std::span<const Index> extents, const std::string& where) {
  Index total = 1;
  for (const Index extent : extents) {
    if (__builtin_mul_overflow(total, extent, &total)) {
      refuse(where, ": its declared shape ", text(extents),
             " holds more than 2^63 elements; the file is damaged");
    }
  }
  return total;
}

const char* name_of(H5L_type_t link) {
  switch (link) {
    case H5L_TYPE_SOFT:
      return "a soft link";
    case H5L_TYPE_EXTERNAL:
      return "an external link (to another file)";
    default:
      return "a user-defined link";
  }
}

/// Opens a member through its hard link: any other kind of link could lead out of the file.
Handle open_member(hid_t parent, const std::string& name, const std::string& where, H5O_type_t expected) {
  const char* kind = expected == H5O_TYPE_GROUP ? "group" : "dataset";
  if (checked(H5Lexists(parent, name.c_str(), H5P_DEFAULT), where, "look for it") == 0) {
    refuse(where, ": missing, expected a ", kind, "; see traces/FORMAT.md for what a trace holds");
  }
  H5L_info_t link;
  checked(H5Lget_info(parent, name.c_str(), &link, H5P_DEFAULT), where, "read the link");
  if (link.type != H5L_TYPE_HARD) {
    refuse(where, ": found ", name_of(link.type), ", expected a hard link to a ", kind,
           "; write the data into the trace itself");
  }
  Handle object(checked(H5Oopen(parent, name.c_str(), H5P_DEFAULT), where, "open the object"));
  const H5I_type_t found = H5Iget_type(object.get());
  if (found != (expected == H5O_TYPE_GROUP ? H5I_GROUP : H5I_DATASET)) {
    refuse(where, ": found a ",
           found == H5I_GROUP     ? "group"
           : found == H5I_DATASET ? "dataset"
                                  : "named type",
           ", expected a ", kind, "; see traces/FORMAT.md for what a trace holds");
  }
  return object;
}

FloatFields fields_of(hid_t type) {
  FloatFields fields{};
  fields.bytes = H5Tget_size(type);
  fields.bias = H5Tget_ebias(type);
  H5Tget_fields(type, &fields.sign, &fields.exponent, &fields.exponent_bits, &fields.mantissa,
                &fields.mantissa_bits);
  return fields;
}

bool is_whole_and_normalised(hid_t type) {
  return H5Tget_precision(type) == 8 * H5Tget_size(type) && H5Tget_offset(type) == 0 &&
         H5Tget_norm(type) == H5T_NORM_IMPLIED;
}

bool is_swapped(hid_t type) {
  const H5T_order_t native = std::endian::native == std::endian::little ? H5T_ORDER_LE : H5T_ORDER_BE;
  return H5Tget_size(type) > 1 && H5Tget_order(type) != native;
}

std::string describe_float(const FloatFields& fields) {
  if (fields == kFloat64) {
    return "float64";
  }
  return message("an unknown ", 8 * fields.bytes, "-bit float type (sign bit ", fields.sign,
                 ", exponent bits ", fields.exponent, "..", fields.exponent + fields.exponent_bits - 1,
                 " with bias ", fields.bias, ", mantissa bits ", fields.mantissa, "..",
                 fields.mantissa + fields.mantissa_bits - 1, ")");
}

std::string describe_type(hid_t type) {
  const std::size_t bits = 8 * H5Tget_size(type);
  switch (H5Tget_class(type)) {
    case H5T_INTEGER:
      return message(H5Tget_sign(type) == H5T_SGN_NONE ? "uint" : "int", bits);
    case H5T_FLOAT:
      return describe_float(fields_of(type));
    case H5T_STRING:
      return H5Tis_variable_str(type) > 0 ? "a variable-length string" : "string";
    case H5T_COMPOUND:
      return "a compound type";
    case H5T_ENUM:
      return "an enumeration";
    default:
      return "another type";
  }
}

std::optional<FloatType> payload_type_of(hid_t type) {
  if (H5Tget_class(type) != H5T_FLOAT || !is_whole_and_normalised(type)) {
    return std::nullopt;
  }
  const FloatFields fields = fields_of(type);
  if (fields == kFloat32) {
    return FloatType::float32;
  }
  if (fields == kFloat16) {
    return FloatType::float16;
  }
  if (fields == kBfloat16) {
    return FloatType::bfloat16;
  }
  return std::nullopt;
}

std::string without_padding(std::string padded, hid_t type) {
  const char padding = H5Tget_strpad(type) == H5T_STR_SPACEPAD ? ' ' : '\0';
  if (padding == '\0') {
    padded.resize(std::min(padded.size(), padded.find('\0')));
  } else {
    padded.resize(padded.find_last_not_of(padding) + 1);
  }
  return padded;
}

}  // namespace

Guard::Guard() {
  if (guards == 0) {
    library_mutex().lock();
  }
  ++guards;
  // Without its exit handler: after a failed write that one crashes on what could not be closed
  // (HDF5 1.10.8).
  [[maybe_unused]] static const herr_t once = H5dont_atexit();
  H5Eget_auto2(H5E_DEFAULT, &print_, &print_data_);
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
}

Guard::~Guard() {
  H5Eset_auto2(H5E_DEFAULT, print_, print_data_);
  if (--guards == 0) {
    library_mutex().unlock();
  }
}

Handle::~Handle() {
  if (valid()) {
    const Guard guard;
    H5Idec_ref(id_);
  }
}

std::string library_reason() {
  std::string reason = "no reason given";
  const auto take_first = [](unsigned depth, const H5E_error2_t* error, void* out) -> herr_t {
    if (depth == 0 && error->desc != nullptr) {
      *static_cast<std::string*>(out) = error->desc;
    }
    return 0;
  };
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, take_first, &reason);
  constexpr std::string_view kSystem = "error message = '";  // the library's wording of a failed system call
  if (const std::size_t start = reason.find(kSystem); start != std::string::npos) {
    reason = reason.substr(start + kSystem.size());
    reason = reason.substr(0, reason.find('\''));
  }
  std::replace(reason.begin(), reason.end(), '\n', ' ');
  return reason;
}

// ---- File

File::File(std::filesystem::path path, bool lock, bool map) : path_(std::move(path)) {
  open_descriptor(lock);
  try {
    check_signature();
  } catch (...) {
    ::close(descriptor_);
    throw;
  }
  if (map) {
    void* start = ::mmap(nullptr, static_cast<std::size_t>(bytes_), PROT_READ, MAP_SHARED, descriptor_, 0);
    if (start != MAP_FAILED) {  // a file system that cannot map is read through the library instead
      map_ = {static_cast<const std::byte*>(start), static_cast<std::size_t>(bytes_)};
    }
  }
}

File::~File() {
  if (!map_.empty()) {
    ::munmap(const_cast<std::byte*>(map_.data()), map_.size());
  }
  id_ = Handle();
  ::close(descriptor_);
}

void File::open_descriptor(bool lock) {
  // Not blocking, so that a named pipe is refused below and does not wait for a writer.
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) {
    const char* advice = errno == ENOENT ? "; check the path" : "; check the path and its permissions";
    refuse(name(), ": cannot be opened (", std::strerror(errno), ")", advice);
  }
  struct stat status {};
  const bool is_file = ::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode);
  if (!is_file || status.st_size == 0) {
    ::close(descriptor_);
    refuse(name(), is_file ? ": is empty, expected a trace; record or copy it again"
                   : S_ISDIR(status.st_mode)
                       ? ": is a directory, expected a trace file; name the file in it"
                       : ": is not a regular file, expected a trace file; copy it to one");
  }
  bytes_ = status.st_size;
  // The library's own lock is not used: its failures cannot be told apart.
  if (lock && ::flock(descriptor_, LOCK_SH | LOCK_NB) != 0) {
    const int reason = errno;
    ::close(descriptor_);
    if (reason == EWOULDBLOCK) {
      refuse(name(), ": locked by another process (errno ", reason,
             "), which is writing it; wait until it is done, or read it as it is with --no-lock");
    }
    refuse(name(), ": the file system has no locks (errno ", reason, ", ", std::strerror(reason),
           "); read the file with --no-lock");
  }
}

void File::check_signature() const {
  constexpr std::array<unsigned char, 8> kSignature{0x89, 'H', 'D', 'F', '\r', '\n', 0x1A, '\n'};
  std::array<unsigned char, 12> head{};
  // HDF5 looks for its signature at 0, 512, 1024, 2048, ...: what stands before it belongs to somebody else.
  for (Index offset = 0; offset < bytes_; offset = offset == 0 ? 512 : 2 * offset) {
    const ssize_t got = ::pread(descriptor_, head.data(), head.size(), offset);
    if (got < static_cast<ssize_t>(kSignature.size()) ||
        !std::equal(kSignature.begin(), kSignature.end(), head.begin())) {
      continue;
    }
    const unsigned version = head[8];
    if (version > 3) {
      refuse(name(), ": HDF5 superblock version ", version,
             ", expected at most 3; write it again with libver bounds of 1.10");
    }
    if (version >= 2 && head[11] != 0) {
      refuse(name(),
             ": still marked as open for writing: its writer was killed or is running, expected a closed ",
             "file; wait for the writer, or record it again");
    }
    return;
  }
  refuse(name(),
         ": not an HDF5 file (no signature), expected a trace; other formats go through `hae import`");
}

void File::open_library() const {
  const Handle access(H5Pcreate(H5P_FILE_ACCESS));
  H5Pset_file_locking(access.get(), false, true);
  id_ = Handle(H5Fopen(path_.c_str(), H5F_ACC_RDONLY, access.get()));
  if (id_.valid()) {
    return;
  }
  if (lacked_memory()) {
    throw std::bad_alloc();
  }
  const std::string reason = library_reason();
  if (reason.find("truncated") != std::string::npos) {
    refuse(name(), ": truncated: it has ", bytes_, " bytes, expected more (", reason,
           "); its writer was killed or the copy is partial: copy or record it again");
  }
  refuse(name(), ": HDF5 cannot open it (", reason, "); ", remedy_for(reason));
}

Group File::root() const {
  const Guard guard;
  if (!id_.valid()) {
    open_library();
  }
  return {*this, Handle(checked(H5Gopen2(id_.get(), "/", H5P_DEFAULT), name() + ":/", "open the root")),
          name() + ":"};
}

// ---- Group

bool Group::has(const std::string& name) const {
  const Guard guard;
  return checked(H5Lexists(id_.get(), name.c_str(), H5P_DEFAULT), where_ + "/" + name, "look for it") > 0;
}

Index Group::members() const {
  const Guard guard;
  H5G_info_t info;
  checked(H5Gget_info(id_.get(), &info), where_, "count the members");
  return static_cast<Index>(info.nlinks);
}

std::vector<std::string> Group::names() const {
  const Guard guard;
  std::vector<std::string> names;
  const auto add = [](hid_t, const char* name, const H5L_info_t*, void* out) -> herr_t {
    static_cast<std::vector<std::string>*>(out)->emplace_back(name);
    return 0;
  };
  checked(H5Literate(id_.get(), H5_INDEX_NAME, H5_ITER_INC, nullptr, add, &names), where_,
          "list the members");
  return names;
}

Group Group::group(const std::string& name) const {
  const Guard guard;
  const std::string where = where_ + "/" + name;
  return {*file_, open_member(id_.get(), name, where, H5O_TYPE_GROUP), where};
}

Dataset Group::dataset(const std::string& name, Content content) const {
  const Guard guard;
  return {*file_, id_.get(), name, where_ + "/" + name, content};
}

bool Group::has_attribute(const std::string& name) const {
  const Guard guard;
  return checked(H5Aexists(id_.get(), name.c_str()), where_, "look for an attribute") > 0;
}

Handle Group::attribute(const std::string& name) const {
  if (!has_attribute(name)) {
    refuse(where_, ": attribute '", name, "' is missing; see traces/FORMAT.md for what a trace holds");
  }
  Handle attribute(checked(H5Aopen(id_.get(), name.c_str(), H5P_DEFAULT), where_, "open an attribute"));
  const Handle space(checked(H5Aget_space(attribute.get()), where_, "read an attribute"));
  if (H5Sget_simple_extent_npoints(space.get()) != 1) {
    refuse_attribute(name, "one value");
  }
  return attribute;
}

void Group::refuse_attribute(const std::string& name, const std::string& expected) const {
  refuse(where_, ": attribute '", name, "' is not ", expected,
         "; see traces/FORMAT.md for what a trace holds");
}

Index Group::integer(const std::string& name) const {
  const Guard guard;
  const Handle source = attribute(name);
  const Handle type(H5Aget_type(source.get()));
  // h5py stores a bool as an enumeration of two integers.
  const H5T_class_t kind = H5Tget_class(type.get());
  if (kind != H5T_INTEGER && kind != H5T_ENUM) {
    refuse_attribute(name, "an integer");
  }
  Index value = 0;
  checked(H5Aread(source.get(), H5T_NATIVE_INT64, &value), where_, "read an attribute");
  return value;
}

double Group::real(const std::string& name) const {
  const Guard guard;
  const Handle source = attribute(name);
  const Handle type(H5Aget_type(source.get()));
  const H5T_class_t kind = H5Tget_class(type.get());
  const FloatFields fields = kind == H5T_FLOAT ? fields_of(type.get()) : FloatFields{};
  if (kind != H5T_INTEGER && fields != kFloat64 && fields != kFloat32) {
    refuse_attribute(name, "a float64");
  }
  double value = 0;
  checked(H5Aread(source.get(), H5T_NATIVE_DOUBLE, &value), where_, "read an attribute");
  return value;
}

std::string Group::string(const std::string& name) const {
  const Guard guard;
  const Handle source = attribute(name);
  const Handle type(H5Aget_type(source.get()));
  if (H5Tget_class(type.get()) != H5T_STRING) {
    refuse_attribute(name, "a string");
  }
  if (H5Tis_variable_str(type.get()) > 0) {
    char* value = nullptr;
    checked(H5Aread(source.get(), type.get(), &value), where_, "read an attribute");
    std::string copy = value == nullptr ? "" : value;
    H5free_memory(value);
    return copy;
  }
  // An attribute lives in an object header and is small; what is stored elsewhere must fit the file.
  const std::size_t bytes = H5Tget_size(type.get());
  if (static_cast<Index>(bytes) > file_->bytes()) {
    refuse_attribute(name, "a string that fits the file");
  }
  std::string value(bytes, '\0');
  checked(H5Aread(source.get(), type.get(), value.data()), where_, "read an attribute");
  return without_padding(std::move(value), type.get());
}

// ---- Dataset

Dataset::Dataset(const File& file, hid_t parent, const std::string& name, std::string where, Content content)
    : where_(std::move(where)), id_(open_member(parent, name, where_, H5O_TYPE_DATASET)) {
  const Handle properties(checked(H5Dget_create_plist(id_.get()), where_, "read the layout"));
  check_layout(properties.get());
  check_filters(properties.get());
  type_ = Handle(checked(H5Dget_type(id_.get()), where_, "read the type"));
  check_type(content);
  read_shape();
  switch (storage_) {
    case Storage::compact:
      check_compact();
      break;
    case Storage::contiguous:
      check_contiguous(file);
      break;
    case Storage::chunked:
      check_chunks(file, properties.get());
      break;
  }
}

void Dataset::check_layout(hid_t properties) {
  if (H5Pget_external_count(properties) != 0) {
    refuse(where_, ": found external storage (its bytes are in another file), expected them here; ",
           "write the data into the trace itself");
  }
  switch (H5Pget_layout(properties)) {
    case H5D_COMPACT:
      storage_ = Storage::compact;
      return;
    case H5D_CONTIGUOUS:
      storage_ = Storage::contiguous;
      return;
    case H5D_CHUNKED:
      storage_ = Storage::chunked;
      return;
    case H5D_VIRTUAL:
      refuse(where_, ": found a virtual dataset (a view of other files), expected the data; ",
             "write the data into the trace itself");
    default:
      refuse(where_, ": found an unknown layout, expected contiguous or chunked; write it again");
  }
}

void Dataset::check_filters(hid_t properties) {
  const int count = H5Pget_nfilters(properties);
  for (int i = 0; i < count; ++i) {
    unsigned flags = 0;
    unsigned config = 0;
    unsigned first_value = 0;
    std::size_t values = 1;
    const H5Z_filter_t filter = H5Pget_filter2(properties, static_cast<unsigned>(i), &flags, &values,
                                               &first_value, 0, nullptr, &config);
    switch (filter) {
      case H5Z_FILTER_DEFLATE:
        if (std::ranges::count(filters_, Filter::Kind::deflate, &Filter::kind) != 0) {
          refuse(where_, ": found the filter deflate twice, expected it once; write it again");
        }
        filters_.push_back({Filter::Kind::deflate});
        break;
      case H5Z_FILTER_SHUFFLE:
        if (values < 1 || first_value < 1) {
          refuse(where_, ": found a shuffle filter of no element size; it is damaged: write it again");
        }
        filters_.push_back({Filter::Kind::shuffle, first_value});
        break;
      case H5Z_FILTER_FLETCHER32:
        filters_.push_back({Filter::Kind::fletcher32});
        break;
      default:
        refuse(where_, ": found filter ", filter,
               ", expected deflate, shuffle or fletcher32; write it again");
    }
  }
}

void Dataset::check_type(Content content) {
  const H5T_class_t kind = H5Tget_class(type_.get());
  const std::optional<FloatType> payload = payload_type_of(type_.get());
  element_bytes_ = static_cast<Index>(H5Tget_size(type_.get()));
  type_name_ = payload ? traces::name_of(*payload) : describe_type(type_.get());
  if (element_bytes_ < 1) {
    refuse(where_, ": found elements of no size; it is damaged: copy or record it again");
  }
  swapped_ = (kind == H5T_INTEGER || kind == H5T_FLOAT) && is_swapped(type_.get());
  const auto require = [&](bool holds, const char* expected) {
    if (!holds) {
      refuse(where_, ": found ", type_name_, ", expected ", expected, "; write it with that type");
    }
  };
  switch (content) {
    case Content::integers:
      return require(kind == H5T_INTEGER && element_bytes_ <= 8, "integers of at most 64 bits");
    case Content::payload:
      require(payload.has_value(), "float32, float16 or bfloat16");
      float_type_ = *payload;
      return;
    case Content::reals:
      return require(
          payload == FloatType::float32 || (kind == H5T_FLOAT && fields_of(type_.get()) == kFloat64),
          "float32 or float64");
    case Content::bytes:
      return require(kind == H5T_INTEGER && element_bytes_ == 1, "uint8");
    case Content::strings:
      return require(kind == H5T_STRING && H5Tis_variable_str(type_.get()) == 0, "fixed-length strings");
  }
}

void Dataset::read_shape() {
  const Handle space(checked(H5Dget_space(id_.get()), where_, "read the shape"));
  if (H5Sget_simple_extent_type(space.get()) == H5S_NULL) {
    refuse(where_, ": found no elements at all (a null dataspace), expected an array; write it again");
  }
  const int rank = checked(H5Sget_simple_extent_ndims(space.get()), where_, "read the shape");
  std::vector<hsize_t> extents(static_cast<std::size_t>(rank));
  H5Sget_simple_extent_dims(space.get(), extents.data(), nullptr);
  for (const hsize_t extent : extents) {
    shape_.push_back(static_cast<Index>(std::min<hsize_t>(extent, INT64_MAX)));
  }
  const std::array<Index, 2> bytes{product(shape_, where_), element_bytes_};
  product(bytes, where_);
  stored_bytes_ = static_cast<Index>(H5Dget_storage_size(id_.get()));
}

Index Dataset::elements() const {
  return product(shape_, where_);
}

void Dataset::check_compact() const {
  if (stored_bytes_ < declared_bytes()) {
    refuse(where_, ": declares ", declared_bytes(), " bytes but stores ", stored_bytes_,
           "; it is damaged: copy or record it again");
  }
}

void Dataset::check_contiguous(const File& file) {
  const Index declared = declared_bytes();
  if (declared == 0) {
    return;
  }
  const haddr_t offset = H5Dget_offset(id_.get());
  if (offset == HADDR_UNDEF) {
    refuse(where_, ": declares ", declared, " bytes but none were ever written; record it again");
  }
  const auto room = static_cast<haddr_t>(file.bytes());
  if (stored_bytes_ < declared || offset > room || static_cast<haddr_t>(declared) > room - offset) {
    refuse(where_, ": declares ", declared,
           " bytes, more than the file holds there; copy or record it again");
  }
  if (!file.map().empty()) {
    mapped_ = file.map().data() + offset;
  }
}

void Dataset::check_chunks(const File& file, hid_t properties) {
  std::vector<hsize_t> extents(shape_.size());
  const int rank = H5Pget_chunk(properties, static_cast<int>(extents.size()), extents.data());
  if (rank != static_cast<int>(shape_.size()) || std::ranges::count(extents, hsize_t{0}) != 0) {
    refuse(where_, ": its chunks do not cut the shape ", shape_, "; it is damaged: copy or record it again");
  }
  for (const hsize_t extent : extents) {
    chunk_.push_back(static_cast<Index>(extent));
  }
  Index chunk_bytes = 0;
  if (__builtin_mul_overflow(product(chunk_, where_), element_bytes_, &chunk_bytes) ||
      chunk_bytes > kLargestChunkBytes) {
    refuse(where_, ": chunks of ", chunk_, " elements, expected at most ", kLargestChunkBytes,
           " bytes; write it again, contiguous or with chunks of 64 KiB to 4 MiB");
  }
  const Chunking chunking{shape_, chunk_, element_bytes_};
  Index expected = 1;
  Index band = 1;  // chunks that hold one step along the axis that readers advance on: positions, rows
  for (std::size_t axis = 0; axis < shape_.size(); ++axis) {
    expected = product(std::array<Index, 2>{expected, chunking.along(axis)}, where_);
    band *= axis == 1 ? 1 : chunking.along(axis);
  }
  chunks_ =
      ChunkReader(chunking, std::clamp<Index>(kLargestCacheBytes / chunk_bytes, 1, std::max<Index>(band, 1)));
  const Handle space(H5Dget_space(id_.get()));
  hsize_t found = 0;
  checked(H5Dget_num_chunks(id_.get(), space.get(), &found), where_, "count the chunks");
  if (static_cast<Index>(found) != expected) {
    refuse(where_, ": ", found, " of its ", expected,
           " chunks are stored; the rest was never written: record it again");
  }
  // Deflate never shrinks a byte stream more than 1032 times: a larger promise is not data.
  if (stored_bytes_ > file.bytes() || declared_bytes() / 1040 > stored_bytes_) {
    refuse(where_, ": declares ", declared_bytes(), " bytes but stores ", stored_bytes_, " in a file of ",
           file.bytes(), "; it is damaged: copy or record it again");
  }
}

void Dataset::expect_shape(std::span<const Axis> axes) const {
  bool same = axes.size() == shape_.size();
  std::string names;
  std::string sizes;
  for (std::size_t axis = 0; axis < axes.size(); ++axis) {
    same = same && (!axes[axis].extent || *axes[axis].extent == shape_[axis]);
    names += (axis == 0 ? "" : ", ") + std::string(axes[axis].name);
    sizes += (axis == 0 ? "" : ", ") + (axes[axis].extent ? text(*axes[axis].extent) : "any");
  }
  if (!same) {
    refuse(where_, ": found shape ", shape_, ", expected [", names, "] = [", sizes,
           "]; see traces/FORMAT.md");
  }
}

/// A chunk as it is stored, which check_chunks() has found to be no larger than the file.
StoredChunk Dataset::fetch(std::span<const Index> origin) const {
  const Guard guard;
  const std::vector<hsize_t> offset(origin.begin(), origin.end());
  StoredChunk chunk;
  haddr_t address = HADDR_UNDEF;
  hsize_t bytes = 0;
  checked(H5Dget_chunk_info_by_coord(id_.get(), offset.data(), &chunk.skipped, &address, &bytes), where_,
          "find a chunk");
  if (address == HADDR_UNDEF || static_cast<Index>(bytes) > stored_bytes_) {
    refuse(where_, ": the chunk at ", origin, " is not stored; it is damaged: copy or record it again");
  }
  chunk.bytes.resize(bytes);
  std::uint32_t skipped = 0;
  checked(H5Dread_chunk(id_.get(), H5P_DEFAULT, offset.data(), &skipped, chunk.bytes.data()), where_,
          "read it");
  return chunk;
}

/// A hyperslab in the stored type.
void Dataset::read_codes(std::span<const Index> start, std::span<const Index> count,
                         std::span<std::byte> out) const {
  if (storage_ == Storage::chunked) {
    return chunks_.read(start, count, out, [&](std::span<const Index> origin) {
      return unpack(fetch(origin), filters_,
                    static_cast<std::size_t>(product(chunk_, where_) * element_bytes_), where_);
    });
  }
  const Guard guard;
  const std::vector<hsize_t> from(start.begin(), start.end());
  const std::vector<hsize_t> extent(count.begin(), count.end());
  const hsize_t total = out.size() / static_cast<std::size_t>(element_bytes_);
  const Handle file_space(checked(H5Dget_space(id_.get()), where_, "read the shape"));
  const Handle memory_space(H5Screate_simple(1, &total, nullptr));
  if (!shape_.empty()) {
    checked(
        H5Sselect_hyperslab(file_space.get(), H5S_SELECT_SET, from.data(), nullptr, extent.data(), nullptr),
        where_, "select rows");
  }
  checked(H5Dread(id_.get(), type_.get(), memory_space.get(), file_space.get(), H5P_DEFAULT, out.data()),
          where_, "read it");
}

void Dataset::read_all_codes(std::span<std::byte> out) const {
  if (!out.empty()) {
    read_codes(std::vector<Index>(shape_.size(), 0), shape_, out);
  }
}

/// Every element as one of this machine's numbers, which are at least as wide as the stored ones.
template <typename Number>
std::vector<Number> Dataset::read_as(hid_t number_type) const {
  HAE_EXPECTS(element_bytes_ <= Index{sizeof(Number)});
  std::vector<Number> values(static_cast<std::size_t>(elements()));
  read_all_codes(std::as_writable_bytes(std::span(values)).first(static_cast<std::size_t>(declared_bytes())));
  const Guard guard;
  checked(H5Tconvert(type_.get(), number_type, values.size(), values.data(), nullptr, H5P_DEFAULT), where_,
          "convert it");
  return values;
}

std::vector<Index> Dataset::read_integers() const {
  return read_as<Index>(H5T_NATIVE_INT64);
}

std::vector<double> Dataset::read_reals() const {
  return read_as<double>(H5T_NATIVE_DOUBLE);
}

std::vector<std::string> Dataset::read_strings() const {
  std::string all(static_cast<std::size_t>(declared_bytes()), '\0');
  read_all_codes(std::as_writable_bytes(std::span(all)));
  std::vector<std::string> values;
  const auto length = static_cast<std::size_t>(element_bytes_);
  for (std::size_t begin = 0; begin < all.size(); begin += length) {
    values.push_back(without_padding(all.substr(begin, length), type_.get()));
  }
  return values;
}

void Dataset::read(std::span<const Index> start, std::span<const Index> count, std::span<float> out) const {
  HAE_EXPECTS(start.size() == shape_.size() && count.size() == shape_.size());
  HAE_EXPECTS(product(count, where_) == static_cast<Index>(out.size()));
  for (std::size_t axis = 0; axis < shape_.size(); ++axis) {
    HAE_EXPECTS(start[axis] >= 0 && count[axis] >= 0 && start[axis] + count[axis] <= shape_[axis]);
  }
  if (out.empty()) {
    return;
  }
  return mapped_ != nullptr ? read_mapped(start, count, out) : read_buffered(start, count, out);
}

void Dataset::read_mapped(std::span<const Index> start, std::span<const Index> count,
                          std::span<float> out) const {
  // A run takes the rest of the axes from `first` on: they lie next to each other in the file.
  std::size_t first = shape_.size() - 1;
  Index run = count[first];
  Index stride = 1;
  while (first > 0 && count[first] == shape_[first]) {
    stride *= shape_[first];
    --first;
    run *= count[first];
  }
  for (Index done = 0; done < static_cast<Index>(out.size()); done += run) {
    // The run's place in the file, from its number in the selection: outer axes vary slowest.
    Index rest = done / run;
    Index offset = start[first] * stride;
    Index outer_stride = stride * shape_[first];
    for (std::size_t axis = first; axis-- > 0;) {
      offset += (start[axis] + rest % count[axis]) * outer_stride;
      rest /= count[axis];
      outer_stride *= shape_[axis];
    }
    const auto bytes = static_cast<std::size_t>(run * element_bytes_);
    decode(float_type_, swapped_, {mapped_ + offset * element_bytes_, bytes},
           out.subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(run)));
  }
}

void Dataset::read_buffered(std::span<const Index> start, std::span<const Index> count,
                            std::span<float> out) const {
  // Raw codes, in the file's own type: the library converts nothing. They go to the tail of `out`, where
  // decoding reads them before it overwrites them.
  const std::span<std::byte> memory = std::as_writable_bytes(out);
  const std::span<std::byte> codes = memory.last(out.size() * static_cast<std::size_t>(element_bytes_));
  read_codes(start, count, codes);
  decode(float_type_, swapped_, codes, out);
}

}  // namespace hae::traces::hdf5
