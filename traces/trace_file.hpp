#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "sim/trace.hpp"
#include "traces/details.hpp"

namespace hae::traces {

namespace hdf5 {
class File;
}

/// How a trace file is opened.
struct OpenOptions {
  bool lock = true;        ///< hold a shared lock; without it a file that is being written is read as it is
  bool memory_map = true;  ///< read contiguous datasets from the mapped file
};

/// How one dataset is stored.
struct StoredDataset {
  std::string path;  ///< below the sequence: `layers/000000/k`
  std::string type;
  std::vector<Index> shape;
  std::vector<Index> chunk;          ///< empty: contiguous or compact
  std::vector<std::string> filters;  ///< in the order of writing
  Index declared_bytes = 0;
  Index stored_bytes = 0;
};

/// A trace file, version 1 (FORMAT.md).
///
/// Opening checks the file's name, format, version and completeness; `open` checks everything that is cheap
/// about one sequence: every link, shape, type and stored size, before a byte of payload is read. What costs
/// a pass over the payload (finite numbers, row sums) is checked by who reads it, or by check_trace().
///
/// float32 that is contiguous, aligned and in this machine's byte order is never copied: `keys()` and
/// `values()` are views of the mapped file. Other layouts are read in blocks and converted. A file cut short
/// while it is mapped ends the process with SIGBUS, as with any mapped file: `memory_map = false` reads
/// through the library.
///
/// HDF5 crashes on some damaged files, so the metadata of the file and of each sequence is read in a child
/// process before it is read here (FORMAT.md, "Limits"): `fork` must be allowed, and SIGCHLD may reach the
/// host. A file that does not survive that is refused as damaged.
///
/// Objects may be used from several threads, one thread an object. A sequence keeps its file open.
///
/// throws TraceError  `FILE:/dataset: what was found, what was expected; what to do`
class TraceFile final : public TraceSource {
 public:
  explicit TraceFile(const std::filesystem::path& path, OpenOptions options = {});
  ~TraceFile() override;

  [[nodiscard]] Index sequences() const override;
  [[nodiscard]] std::unique_ptr<Sequence> open(Index index) override;
  [[nodiscard]] std::string name() const override;

  [[nodiscard]] const TraceOrigin& origin() const { return origin_; }
  [[nodiscard]] const std::vector<std::string>& sequence_names() const { return sequence_names_; }
  [[nodiscard]] Index bytes() const;

  [[nodiscard]] SequenceDetails details(Index index) const;

  /// Every dataset that version 1 knows, in the order of FORMAT.md, layers ascending.
  [[nodiscard]] std::vector<StoredDataset> datasets(Index index) const;

  /// What is wrong with the optional datasets of a sequence, the first violation of each: frames and patches
  /// that belong to no picture, numbers that are not finite, pictures that are none.
  [[nodiscard]] std::vector<std::string> optional_violations(Index index) const;

  /// The image ids of a sequence whose picture is stored, ascending.
  [[nodiscard]] std::vector<Index> pictures(Index index) const;

 private:
  void meet(Index index) const;
  void rehearse(Range sequences) const;

  std::shared_ptr<const hdf5::File> file_;
  TraceOrigin origin_;
  std::vector<std::string> sequence_names_;
  mutable std::vector<bool> met_;  // [sequence] all its metadata has been read in a child process
  mutable Index batch_ = 1;        // how many sequences the next child reads
};

}  // namespace hae::traces
