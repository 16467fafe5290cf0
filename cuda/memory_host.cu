#include "cuda/memory.hpp"

#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "cuda/runtime.hpp"

namespace hae::device {
std::string system_name() {
  return THRUST_DEVICE_SYSTEM == THRUST_DEVICE_SYSTEM_OMP ? "omp" : "cpp";
}

std::string device_name() {
  return THRUST_DEVICE_SYSTEM == THRUST_DEVICE_SYSTEM_OMP ? "this machine's processor, OpenMP threads"
                                                          : "this machine's processor, one thread";
}

bool is_accelerator() {
  return false;
}

void check_device() {}

Index free_bytes() {
  return Index{sysconf(_SC_AVPHYS_PAGES)} * Index{sysconf(_SC_PAGESIZE)} / 2;
}

void synchronize(Stream /*stream*/) {}

Buffer::Buffer(Index bytes) : bytes_(bytes) {
  HAE_EXPECTS(bytes >= 0);
  data_ = bytes > 0 ? std::malloc(at(bytes)) : nullptr;
  if (bytes > 0 && data_ == nullptr) {
    throw DeviceError("out of memory: " + std::to_string(bytes) + " bytes needed, " +
                      std::to_string(free_bytes()) + " free; replay fewer sequences at a time");
  }
}

Buffer::~Buffer() {
  std::free(data_);
}

void Buffer::write(const void* host, Index bytes, Index offset, Stream /*stream*/) {
  HAE_EXPECTS(bytes >= 0 && offset >= 0 && offset + bytes <= bytes_);
  if (bytes > 0) {
    std::memcpy(static_cast<char*>(data_) + offset, host, at(bytes));
  }
}

void Buffer::read(void* host, Index bytes, Stream /*stream*/) const {
  HAE_EXPECTS(bytes >= 0 && bytes <= bytes_);
  if (bytes > 0) {
    std::memcpy(host, data_, at(bytes));
  }
}

void Buffer::clear(Stream /*stream*/) {
  if (bytes_ > 0) {
    std::memset(data_, 0, at(bytes_));
  }
}

}  // namespace hae::device
