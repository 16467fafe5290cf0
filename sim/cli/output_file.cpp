#include "sim/cli/output_file.hpp"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>

#include "sim/errors.hpp"

namespace hae::cli {

void write_file(const std::filesystem::path& path, std::string_view text) {
  const std::filesystem::path partial = path.string() + ".partial";
  errno = 0;
  {
    std::ofstream file(partial, std::ios::binary | std::ios::trunc);
    file.write(text.data(), static_cast<std::streamsize>(text.size()));
    file.close();
    if (!file) {
      const std::string reason = std::strerror(errno);
      std::error_code ignored;
      std::filesystem::remove(partial, ignored);
      throw OutputError(path.string() + ": cannot be written (" + reason + "); choose another path");
    }
  }
  std::error_code error;
  std::filesystem::rename(partial, path, error);
  if (error) {
    std::error_code ignored;
    std::filesystem::remove(partial, ignored);
    throw OutputError(path.string() + ": cannot be written (" + error.message() + "); choose another path");
  }
}

}  // namespace hae::cli
