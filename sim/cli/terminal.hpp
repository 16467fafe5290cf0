#pragma once

#include <fmt/color.h>

#include <cstddef>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace hae::cli {

/// Whether a stream is a terminal whose cursor and colours can be set: not one of TERM=dumb.
bool is_terminal(std::FILE* stream);

/// How wide the terminal behind a stream is; none in a pipe or a file, and where a terminal does not say.
std::optional<std::size_t> terminal_columns(std::FILE* stream);

/// Text for stdout: styled on a terminal, unless NO_COLOR says otherwise; as it is in a pipe.
std::string painted(std::string_view text, const fmt::text_style& style);

/// Columns that a terminal shows UTF-8 text in: two for a wide character, none for a combining one.
std::size_t text_width(std::string_view text);

/// Text in lines of at most `width` columns, broken after a space, a comma or a slash where there is one.
std::vector<std::string> wrapped(std::string_view text, std::size_t width);

/// A paragraph for stdout: on a terminal in lines that fit it, each indented; in a pipe one line.
std::string paragraph(std::string_view text, std::size_t indent);

/// Prints lines of prose, each a paragraph.
template <typename... Values>
void print_prose(fmt::format_string<Values...> format, Values&&... values) {
  std::string_view text = "";
  const std::string all = fmt::format(format, std::forward<Values>(values)...);
  for (std::size_t begin = 0; begin <= all.size(); begin += text.size() + 1) {
    text = std::string_view(all).substr(begin, all.find('\n', begin) - begin);
    std::fputs(paragraph(text, 0).c_str(), stdout);
  }
}

}  // namespace hae::cli
