#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "validate/problem.hpp"

namespace hae::validate {

/// The memory a table of kernels works on: its device's, or this process's own.
class Memory {
 public:
  explicit Memory(const hae_memory& device) : device_(device) {}

  /// throws  DeviceError when there is no more
  [[nodiscard]] std::shared_ptr<void> allocate(Index bytes) const;
  void copy_in(void* device, const void* host, Index bytes) const;
  void copy_out(void* host, const void* device, Index bytes) const;
  void synchronize() const;
  [[nodiscard]] hae_context context() const;

 private:
  [[nodiscard]] bool is_host() const { return device_.allocate == nullptr; }

  hae_memory device_;
};

/// One array in memory, between guards that nobody may touch.
class PlacedArray {
 public:
  /// Where each element lies: strides and what they span.
  struct Shape {
    std::vector<Index> extents;
    std::vector<Index> strides;
    std::vector<Index> offsets;  ///< of each element of the tensor, row-major, in elements from the first
    Index span = 0;              ///< elements from the first to beyond the last
  };

  PlacedArray(Type type, Shape shape, bool misaligned, bool writable, const Memory& memory);

  /// Before a call: guards and gaps as they have to stay, elements as given, or all bytes `poison`.
  void fill(const std::vector<double>* values, unsigned char poison);

  /// After a call.
  void fetch();
  [[nodiscard]] std::vector<double> values() const;

  /// Bytes of one element, as fetched.
  [[nodiscard]] const std::byte* element(Index index) const;

  /// What was written that may not be: an input, a gap, a guard. Empty: nothing.
  [[nodiscard]] std::string damage() const;

  [[nodiscard]] const hae_array& array() const { return array_; }
  [[nodiscard]] Type type() const { return type_; }
  void allow_writing() { writable_ = true; }

 private:
  [[nodiscard]] Index byte_of(Index offset) const { return start_ + offset * bytes_of(type_); }

  Type type_;
  Shape shape_;
  bool writable_;
  const Memory& memory_;
  Index start_;  ///< byte of the first element in the block
  std::shared_ptr<void> block_;
  std::vector<std::byte> before_;
  std::vector<std::byte> after_;
  hae_array array_{};
};

/// Everything one call needs, in memory.
class Placement {
 public:
  Placement(const Problem& problem, const Memory& memory);

  void fill(unsigned char poison);
  void fetch();

  /// By the names of kernels.h; what is absent has a null pointer.
  [[nodiscard]] hae_array array(const std::string& name) const;
  [[nodiscard]] const PlacedArray& output(const std::string& name) const { return *placed_.at(name); }

  /// What the call may not have written, by name. Empty: nothing.
  [[nodiscard]] std::map<std::string, std::string> damage() const;

 private:
  void place(const Problem& problem, const Tensor& tensor, bool writable, const Memory& memory);
  void place_block_table(const Problem& problem, const Memory& memory);

  std::map<std::string, std::shared_ptr<PlacedArray>> placed_;
  std::map<std::string, std::vector<double>> contents_;  ///< of what is read
};

}  // namespace hae::validate
