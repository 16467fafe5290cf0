#include "sim/cli/terminal.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <clocale>
#include <cstdlib>
#include <cwchar>

namespace hae::cli {
namespace {

std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// This thread reads text as UTF-8 while it lives, whatever the user's locale is.
class Utf8 {
 public:
  Utf8() : locale_(newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr)), before_(uselocale(locale_)) {}
  ~Utf8() {
    uselocale(before_);
    if (locale_ != nullptr) {
      freelocale(locale_);
    }
  }
  Utf8(const Utf8&) = delete;
  Utf8& operator=(const Utf8&) = delete;

 private:
  locale_t locale_;
  locale_t before_;
};

struct Character {
  std::size_t bytes;
  std::size_t columns;
};

/// The first character of text that is not empty. A byte that is no UTF-8 is one of one column.
Character first_character(std::string_view text) {
  wchar_t code = 0;
  std::mbstate_t state{};
  const std::size_t bytes = std::mbrtowc(&code, text.data(), text.size(), &state);
  if (bytes == 0 || bytes > text.size()) {
    return {1, 1};
  }
  return {bytes, static_cast<std::size_t>(std::max(0, wcwidth(code)))};
}

/// Bytes of the longest beginning that is not wider than `width`, broken well; at least one character.
std::size_t line_bytes(std::string_view text, std::size_t width) {
  std::size_t bytes = 0;
  std::size_t columns = 0;
  std::size_t good = 0;  // behind the last character that a line may end with
  while (bytes < text.size()) {
    const Character next = first_character(text.substr(bytes));
    if (columns + next.columns > width && bytes > 0) {
      return text[bytes] == ' ' ? bytes : (good > 0 ? good : bytes);
    }
    columns += next.columns;
    bytes += next.bytes;
    if (std::string_view(" ,/").find(text[bytes - 1]) != std::string_view::npos) {
      good = bytes;
    }
  }
  return bytes;
}

}  // namespace

bool is_terminal(std::FILE* stream) {
  return isatty(fileno(stream)) == 1 && variable("TERM") != "dumb";
}

std::optional<std::size_t> terminal_columns(std::FILE* stream) {
  winsize size{};
  if (isatty(fileno(stream)) != 1 || ioctl(fileno(stream), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) {
    return std::nullopt;
  }
  return size.ws_col;
}

std::string painted(std::string_view text, const fmt::text_style& style) {
  const bool takes_colour = is_terminal(stdout) && variable("NO_COLOR").empty();
  return takes_colour ? fmt::format("{}", fmt::styled(text, style)) : std::string(text);
}

std::size_t text_width(std::string_view text) {
  const Utf8 reading;
  std::size_t columns = 0;
  while (!text.empty()) {
    const Character next = first_character(text);
    columns += next.columns;
    text.remove_prefix(next.bytes);
  }
  return columns;
}

std::vector<std::string> wrapped(std::string_view text, std::size_t width) {
  const Utf8 reading;
  std::vector<std::string> lines;
  do {
    const std::size_t bytes = line_bytes(text, width);
    std::string& line = lines.emplace_back(text.substr(0, bytes));
    line.resize(line.find_last_not_of(' ') + 1);
    text.remove_prefix(bytes);
    text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  } while (!text.empty());
  return lines;
}

std::string paragraph(std::string_view text, std::size_t indent) {
  const std::string margin(indent, ' ');
  const std::optional<std::size_t> columns = terminal_columns(stdout);
  constexpr std::size_t kLeast = 20;
  std::string lines;
  for (const std::string& line : columns
                                     ? wrapped(text, std::max(kLeast, *columns - std::min(*columns, indent)))
                                     : std::vector{std::string(text)}) {
    lines += (lines.empty() ? "" : margin) + line + '\n';
  }
  return lines;
}

}  // namespace hae::cli
