#include "cuda/memory.hpp"

#include "cuda/for_each_index.hpp"

namespace hae::device {
namespace {

void expect_success(HAE_GPU(Error_t) status, const char* operation) {
  if (status != HAE_GPU(Success)) {
    throw_device_error(operation, HAE_GPU(GetErrorString)(status));
  }
}

HAE_GPU(Stream_t) handle(Stream stream) {
  return static_cast<HAE_GPU(Stream_t)>(stream);
}

DeviceProperties properties() {
  DeviceProperties properties{};
  int device = 0;
  expect_success(HAE_GPU(GetDevice)(&device), "finding the device");
  expect_success(HAE_GPU(GetDeviceProperties)(&properties, device), "reading the device's properties");
  return properties;
}

struct Nothing {
  HAE_HOST_DEVICE void operator()(Index) const {}
};

}  // namespace

std::string system_name() {
  return HAE_ACCELERATOR;
}

std::string device_name() {
  const DeviceProperties device = properties();
  return std::string(device.name) + ", compute capability " + std::to_string(device.major) + "." +
         std::to_string(device.minor);
}

bool is_accelerator() {
  return true;
}

void check_device() {
  int devices = 0;
  const auto status = HAE_GPU(GetDeviceCount)(&devices);
  if (status != HAE_GPU(Success) || devices == 0) {
    static_cast<void>(HAE_GPU(GetLastError)());
    throw DeviceError(std::string("no " HAE_ACCELERATOR " device: ") +
                      (status != HAE_GPU(Success) ? HAE_GPU(GetErrorString)(status) : "none is installed") +
                      "; use --backend reference");
  }
  try {
    for_each_index("starting", nullptr, 1, Nothing{});
    synchronize(nullptr);
  } catch (const DeviceError& error) {
    throw DeviceError(device_name() +
                      ", cannot run this build, which has code for " HAE_DEVICE_ARCHITECTURES " (" +
                      error.what() + "); build for it, or use --backend reference");
  }
}

Index free_bytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  expect_success(HAE_GPU(MemGetInfo)(&free, &total), "asking for free memory");
  return static_cast<Index>(free);
}

void synchronize(Stream stream) {
  expect_success(HAE_GPU(StreamSynchronize)(handle(stream)), "waiting for the device");
}

Buffer::Buffer(Index bytes) : bytes_(bytes) {
  HAE_EXPECTS(bytes >= 0);
  if (bytes > 0 && HAE_GPU(Malloc)(&data_, at(bytes)) != HAE_GPU(Success)) {
    static_cast<void>(HAE_GPU(GetLastError)());  // else the next call would report it
    throw DeviceError("out of device memory: " + std::to_string(bytes) + " bytes needed, " +
                      std::to_string(free_bytes()) + " free; replay fewer sequences at a time");
  }
}

Buffer::~Buffer() {
  static_cast<void>(HAE_GPU(Free)(data_));
}

void Buffer::write(const void* host, Index bytes, Index offset, Stream stream) {
  HAE_EXPECTS(bytes >= 0 && offset >= 0 && offset + bytes <= bytes_);
  expect_success(HAE_GPU(MemcpyAsync)(static_cast<char*>(data_) + offset, host, at(bytes),
                                      HAE_GPU(MemcpyHostToDevice), handle(stream)),
                 "copying to the device");
}

void Buffer::read(void* host, Index bytes, Stream stream) const {
  HAE_EXPECTS(bytes >= 0 && bytes <= bytes_);
  expect_success(HAE_GPU(MemcpyAsync)(host, data_, at(bytes), HAE_GPU(MemcpyDeviceToHost), handle(stream)),
                 "copying from the device");
  synchronize(stream);
}

void Buffer::clear(Stream stream) {
  if (bytes_ > 0) {
    expect_success(HAE_GPU(MemsetAsync)(data_, 0, at(bytes_), handle(stream)), "clearing device memory");
  }
}

}  // namespace hae::device
