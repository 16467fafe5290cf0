#include "traces/hdf5_output.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "traces/message.hpp"

namespace hae::traces::hdf5 {
namespace {

void write_scalar(hid_t object, const std::string& name, hid_t type, hid_t memory_type, const void* value) {
  const Handle space(H5Screate(H5S_SCALAR));
  const Handle attribute(H5Acreate2(object, name.c_str(), type, space.get(), H5P_DEFAULT, H5P_DEFAULT));
  if (!attribute.valid() || H5Awrite(attribute.get(), memory_type, value) < 0) {
    cannot_write("attribute '", name, "': cannot be written (", library_reason(),
                 "); check the space left on the disk");
  }
}

/// The target itself, if nobody writes its temporary file: another process's would be truncated under its
/// hands.
const std::filesystem::path& unlocked(const std::filesystem::path& target) {
  const std::filesystem::path partial = PartialFile::temporary_name(target);
  const int descriptor = ::open(partial.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0 && errno == ENOENT) {
    return target;  // Nobody's; it is made when a signal can already remove it.
  }
  if (descriptor < 0) {
    cannot_write(partial.string(), ": cannot be written (", std::strerror(errno),
                 "); check the folder and its permissions");
  }
  const bool locked = ::flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  ::close(descriptor);
  if (locked) {
    cannot_write(partial.string(),
                 ": locked by another process, which is writing it; wait, or write to another name");
  }
  return target;
}

}  // namespace

void write_attribute(hid_t object, const std::string& name, const std::string& value) {
  const Handle type(H5Tcopy(H5T_C_S1));
  H5Tset_size(type.get(), H5T_VARIABLE);  // which h5py reads as str, not as bytes
  H5Tset_cset(type.get(), H5T_CSET_UTF8);
  const char* letters = value.c_str();
  write_scalar(object, name, type.get(), type.get(), &letters);
}

void write_attribute(hid_t object, const std::string& name, Index value) {
  write_scalar(object, name, H5T_STD_I64LE, H5T_NATIVE_INT64, &value);
}

void write_attribute(hid_t object, const std::string& name, double value) {
  write_scalar(object, name, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, &value);
}

Handle payload_type(FloatType type) {
  Handle handle(H5Tcopy(H5T_IEEE_F32LE));
  if (type != FloatType::float32) {
    const FloatFields& fields = type == FloatType::float16 ? kFloat16 : kBfloat16;
    H5Tset_fields(handle.get(), fields.sign, fields.exponent, fields.exponent_bits, fields.mantissa,
                  fields.mantissa_bits);
    H5Tset_size(handle.get(), fields.bytes);
    H5Tset_ebias(handle.get(), fields.bias);
  }
  return handle;
}

OutputFile::OutputFile(const std::filesystem::path& path, const std::string& format, Index version)
    : file_name_(unlocked(path)) {
  const Guard guard;
  try {
    create(format, version);
  } catch (...) {
    close();
    throw;
  }
}

void OutputFile::create(const std::string& format, Index version) {
  const Handle access(H5Pcreate(H5P_FILE_ACCESS));
  H5Pset_libver_bounds(access.get(), H5F_LIBVER_EARLIEST, H5F_LIBVER_V110);
  H5Pset_alignment(access.get(), 4096, 64);
  // A file system without locks is no reason not to write: the name is ours alone.
  H5Pset_file_locking(access.get(), true, true);
  file_ = opened(H5Fcreate(file_name_.path().c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.get()), "the file");
  root_ = opened(H5Gopen2(file_.get(), "/", H5P_DEFAULT), "the root");
  write_attribute(root_.get(), "format", format);
  write_attribute(root_.get(), "version", version);
}

void OutputFile::close() {
  const Guard guard;
  root_ = Handle();
  file_ = Handle();
}

OutputFile::~OutputFile() {
  if (!finished()) {
    close();
  }
}

void OutputFile::check(herr_t status, const std::string& what) const {
  if (status < 0) {
    cannot_write(file_name_.name(), ": ", what, " cannot be written (", library_reason(),
                 "); check the space left on the disk");
  }
}

Handle OutputFile::opened(hid_t id, const std::string& what) const {
  check(id < 0 ? -1 : 0, what);
  return Handle(id);
}

Handle OutputFile::create_group(hid_t parent, const std::string& name) const {
  return opened(H5Gcreate2(parent, name.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), name);
}

Handle OutputFile::create_dataset(hid_t parent, const std::string& name, hid_t type,
                                  std::span<const hsize_t> shape) const {
  const Handle properties(H5Pcreate(H5P_DATASET_CREATE));
  H5Pset_obj_track_times(properties.get(), false);  // times would make two equal files differ
  // Space is taken at once and never filled: each byte is written exactly once, by its caller.
  H5Pset_alloc_time(properties.get(), H5D_ALLOC_TIME_EARLY);
  H5Pset_fill_time(properties.get(), H5D_FILL_TIME_NEVER);
  const Handle space(H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr));
  return opened(
      H5Dcreate2(parent, name.c_str(), type, space.get(), H5P_DEFAULT, properties.get(), H5P_DEFAULT), name);
}

void OutputFile::write_integers(hid_t parent, const std::string& name, std::span<const Index> values,
                                std::span<const hsize_t> shape) const {
  const Handle dataset = create_dataset(parent, name, H5T_STD_I64LE, shape);
  if (!values.empty()) {
    check(H5Dwrite(dataset.get(), H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()), name);
  }
}

void OutputFile::write_integers(hid_t parent, const std::string& name, std::span<const Index> values) const {
  const hsize_t count = values.size();
  write_integers(parent, name, values, {&count, 1});
}

void OutputFile::write_reals(hid_t parent, const std::string& name, std::span<const double> values,
                             std::span<const hsize_t> shape) const {
  const Handle dataset = create_dataset(parent, name, H5T_IEEE_F64LE, shape);
  if (!values.empty()) {
    check(H5Dwrite(dataset.get(), H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()), name);
  }
}

void OutputFile::write_reals(hid_t parent, const std::string& name, std::span<const double> values) const {
  const hsize_t count = values.size();
  write_reals(parent, name, values, {&count, 1});
}

void OutputFile::write_strings(hid_t parent, const std::string& name,
                               std::span<const std::string> values) const {
  std::size_t length = 1;
  for (const std::string& value : values) {
    length = std::max(length, value.size());
  }
  std::string padded;
  for (std::string value : values) {
    value.resize(length, '\0');
    padded += value;
  }
  const Handle type(H5Tcopy(H5T_C_S1));
  H5Tset_size(type.get(), length);
  H5Tset_strpad(type.get(), H5T_STR_NULLPAD);
  H5Tset_cset(type.get(), H5T_CSET_UTF8);
  const hsize_t count = values.size();
  const Handle dataset = create_dataset(parent, name, type.get(), {&count, 1});
  if (!values.empty()) {
    check(H5Dwrite(dataset.get(), type.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, padded.data()), name);
  }
}

void OutputFile::finish() {
  HAE_EXPECTS(!finished());
  write_attribute(root_.get(), "complete", Index{1});
  root_ = Handle();
  check(H5Fclose(file_.get()), "the end of the file");
  file_.release();
  file_name_.commit();
}

}  // namespace hae::traces::hdf5
