#pragma once

#include <filesystem>
#include <string>

namespace hae {

/// A file that is written under a temporary name, `NAME.partial`, beside its target and renamed when it is
/// whole. Symbolic links are followed. One that is destroyed before commit() removes what it wrote.
class PartialFile {
 public:
  /// The temporary name for a target.
  /// throws  OutputError if the target exists and is not a regular file: a device or a pipe is never replaced
  static std::string temporary_name(const std::filesystem::path& target);

  /// Claims the temporary name of `target`.
  explicit PartialFile(const std::filesystem::path& target);
  ~PartialFile();
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;

  /// Where to write.
  [[nodiscard]] const std::string& path() const { return partial_; }

  /// The target as the caller named it, for messages.
  [[nodiscard]] const std::string& name() const { return name_; }

  [[nodiscard]] bool committed() const { return committed_; }

  /// Renames. throws OutputError
  void commit();

  /// Removes the temporary files of this process. Safe to call from a signal handler.
  static void remove_all() noexcept;

 private:
  void enlist();
  void strike() noexcept;

  std::string name_;
  std::filesystem::path target_;
  std::string partial_;
  bool committed_ = false;
};

/// What a symbolic link, or a chain of them, points to; it need not exist yet.
std::filesystem::path behind_links(std::filesystem::path path);

}  // namespace hae
