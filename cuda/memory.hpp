#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "sim/view.hpp"

namespace hae::device {

/// A queue of work on the device: a cudaStream_t or hipStream_t, null for the default one. On a CPU system
/// work is done when the call returns.
using Stream = void*;

/// The Thrust system this library was built for: `cpp`, `omp`, `cuda` or `hip`.
std::string system_name();

/// Whether work runs on an accelerator with a memory of its own.
bool is_accelerator();

/// What the device calls itself: its name, or the processor's threads that the system uses.
std::string device_name();

/// Throws DeviceError unless the system can run: no device, or one whose architecture the library was not
/// built for.
void check_device();

/// Bytes that may still be allocated. On a CPU system: half of what the machine has free.
Index free_bytes();

/// Waits until everything in the stream is done. throws DeviceError if some of it failed
void synchronize(Stream stream);

/// Bytes on the device. Allocated once and freed by the destructor; contents are undefined until written.
///
/// throws  DeviceError with the bytes needed and free, and leaves the device usable
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(Index bytes);
  ~Buffer();
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] Index bytes() const { return bytes_; }

  void write(const void* host, Index bytes, Index offset, Stream stream);
  void read(void* host, Index bytes, Stream stream) const;  ///< returns when the bytes are there
  void clear(Stream stream);                                ///< all bytes 0

 private:
  void* data_ = nullptr;
  Index bytes_ = 0;
};

/// An array of plain numbers or structs on the device.
template <typename T>
class Array {
 public:
  Array() = default;
  explicit Array(Index count) : buffer_(count * Index{sizeof(T)}), count_(count) {}

  [[nodiscard]] T* data() const { return static_cast<T*>(buffer_.data()); }
  [[nodiscard]] Index size() const { return count_; }

  /// Copies host numbers to elements [first, first + size). The host's may change when the call returns.
  void write(std::span<const T> host, Index first, Stream stream) {
    HAE_EXPECTS(first >= 0 && first + std::ssize(host) <= count_);
    buffer_.write(host.data(), std::ssize(host) * Index{sizeof(T)}, first * Index{sizeof(T)}, stream);
  }
  void write(std::span<const T> host, Stream stream) { write(host, 0, stream); }

  [[nodiscard]] std::vector<T> read(Stream stream) const {
    std::vector<T> host(at(count_));
    buffer_.read(host.data(), count_ * Index{sizeof(T)}, stream);
    return host;
  }
  void clear(Stream stream) { buffer_.clear(stream); }

 private:
  Buffer buffer_;
  Index count_ = 0;
};

/// An array that holds a copy of host numbers.
template <typename T>
Array<T> copy_of(const std::vector<T>& host, Stream stream) {
  Array<T> array(std::ssize(host));
  array.write(host, stream);
  return array;
}

}  // namespace hae::device
