#include "sim/partial_file.hpp"

#include <array>
#include <atomic>
#include <cstdio>

#include "sim/errors.hpp"

namespace hae {
namespace {

// Paths of temporary files that exist now. A signal handler may read them at any time, so each is one atomic
// pointer to a string that outlives its entry. More files than entries are not removed by a signal; no
// command writes so many.
std::array<std::atomic<const char*>, 16> g_partial_paths{};

}  // namespace

std::filesystem::path behind_links(std::filesystem::path path) {
  constexpr int kLongestChain = 40;
  std::error_code unknown;
  for (int links = 0; links < kLongestChain && std::filesystem::is_symlink(path, unknown); ++links) {
    path = path.parent_path() / std::filesystem::read_symlink(path, unknown);
  }
  return path;
}

std::string PartialFile::temporary_name(const std::filesystem::path& target) {
  const std::filesystem::path path = behind_links(target);
  std::error_code unknown;
  if (std::filesystem::exists(path, unknown) && !std::filesystem::is_regular_file(path, unknown)) {
    throw OutputError(target.string() +
                      ": is not a regular file, and would be replaced; choose another path");
  }
  return path.string() + ".partial";
}

PartialFile::PartialFile(const std::filesystem::path& target)
    : name_(target.string()), target_(behind_links(target)), partial_(temporary_name(target)) {
  enlist();
}

PartialFile::~PartialFile() {
  if (!committed_) {
    std::remove(partial_.c_str());
  }
  strike();
}

void PartialFile::commit() {
  HAE_EXPECTS(!committed_);
  std::error_code error;
  std::filesystem::rename(partial_, target_, error);
  if (error) {
    throw OutputError(name_ + ": cannot be written (" + error.message() +
                      "); check the folder and its permissions");
  }
  committed_ = true;
}

void PartialFile::remove_all() noexcept {
  for (std::atomic<const char*>& path : g_partial_paths) {
    if (const char* name = path.load()) {
      std::remove(name);  // two system calls at most, nothing that a signal could find half done
    }
  }
}

void PartialFile::enlist() {
  for (std::atomic<const char*>& path : g_partial_paths) {
    const char* empty = nullptr;
    if (path.compare_exchange_strong(empty, partial_.c_str())) {
      return;
    }
  }
}

void PartialFile::strike() noexcept {
  for (std::atomic<const char*>& path : g_partial_paths) {
    const char* own = partial_.c_str();
    path.compare_exchange_strong(own, nullptr);
  }
}

}  // namespace hae
