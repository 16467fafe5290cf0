#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sim/errors.hpp"
#include "validate/problem.hpp"

namespace hae::validate {

/// An array does not fit.
class NoMemory : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

/// The memory a table of kernels works on: its device's, or this process's own.
class Memory {
 public:
  explicit Memory(const hae_memory& device) : device_(device) {}

  /// throws  NoMemory
  [[nodiscard]] std::shared_ptr<void> allocate(Index bytes) const;

  /// Addresses for an array of few pieces far apart. In this process's own memory only pages that are touched
  /// count; a device gives all of it.
  /// throws  NoMemory
  [[nodiscard]] std::shared_ptr<void> allocate_sparse(Index bytes) const;
  void copy_in(void* device, const void* host, Index bytes) const;
  void copy_out(void* host, const void* device, Index bytes) const;

  /// Whether calls in two streams at once can be tried.
  [[nodiscard]] bool has_other_stream() const { return !is_host() && device_.other_stream != nullptr; }
  enum class Stream { own, other };
  void synchronize(Stream stream) const;
  [[nodiscard]] hae_context context(Stream stream) const;

 private:
  [[nodiscard]] bool is_host() const { return device_.allocate == nullptr; }
  [[nodiscard]] void* handle(Stream stream) const {
    return stream == Stream::own ? device_.stream : device_.other_stream;
  }

  hae_memory device_;
};

/// One array in memory, between guards that nobody may touch.
class PlacedArray {
 public:
  /// Elements that lie together, from a guard to a guard.
  struct Piece {
    Index offset = 0;
    Index span = 0;
  };

  /// Where each element lies: strides and what they span.
  struct Shape {
    std::vector<Index> extents;
    std::vector<Index> strides;
    std::vector<Index> offsets;  ///< of each element of the tensor, row-major, in elements from the first
    /// One, from the first element to the last; of an array that reaches far, one for each index of its
    /// outermost axis: what lies between them is not looked at.
    std::vector<Piece> pieces;
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
  [[nodiscard]] std::byte* address(std::size_t piece) const;
  [[nodiscard]] Index bytes(std::size_t piece) const { return begins_[piece + 1] - begins_[piece]; }

  Type type_;
  Shape shape_;
  bool writable_;
  const Memory& memory_;
  Index lead_;                 ///< bytes of a piece before its first element
  std::vector<Index> begins_;  ///< [pieces + 1] bytes of pieces, guards counted, one after the other
  std::vector<Index> places_;  ///< [elements] byte of each element among them
  std::shared_ptr<void> block_;
  Index origin_ = 0;               ///< byte of the block at which the first piece begins
  std::vector<std::byte> before_;  ///< all pieces
  std::vector<std::byte> after_;
  hae_array array_{};
};

/// Everything one call needs, in memory.
class Placement {
 public:
  Placement(const Problem& problem, const Memory& memory);

  /// Other numbers in the same shape, from the next fill on.
  void give(const Problem& problem);

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
