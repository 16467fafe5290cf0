#include "traces/import_steps.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

#include "traces/check.hpp"
#include "traces/layout.hpp"
#include "traces/message.hpp"

namespace hae::traces {
namespace {

template <typename... Parts>
[[noreturn]] void reject(const Parts&... parts) {
  throw ConfigError(message(parts...));
}

/// Pictures are numbered in the order of their tokens.
std::vector<Index> image_of_each_token(std::vector<Range> images, Index tokens) {
  std::sort(images.begin(), images.end(), [](Range a, Range b) { return a.begin < b.begin; });
  std::vector<Index> image(static_cast<std::size_t>(tokens), -1);
  Index free = 0;
  for (std::size_t number = 0; number < images.size(); ++number) {
    const auto [begin, end] = images[number];
    if (begin < 0 || begin >= end || end > tokens) {
      reject("image ", begin, ":", end, " is no span of the ", tokens,
             " tokens, expected START:END with 0 <= START < END <= ", tokens);
    }
    if (begin < free) {
      reject("image ", begin, ":", end, " overlaps the one before it, expected START >= ", free,
             "; a token belongs to one picture");
    }
    std::fill(image.begin() + begin, image.begin() + end, static_cast<Index>(number));
    free = end;
  }
  return image;
}

}  // namespace

void check_limits(const SequenceInfo& info, const std::string& where) {
  const auto expect = [&](const char* what, Index value, Index most) {
    if (value < 1 || value > most) {
      refuse(where, ": has ", value, " ", what, ", expected 1 .. ", most, "; save it again, or a part of it");
    }
  };
  expect("layers", info.layers, kMostNumbered);
  expect("query heads", info.query_heads, kMostHeads);
  expect("tokens", info.tokens, kMostTokens);
  expect("dimensions of a head", info.head_dim.value_or(1), kMostDimensions);
}

double default_scale(const SequenceInfo& info) {
  return info.head_dim ? 1 / std::sqrt(static_cast<double>(*info.head_dim)) : 1;
}

std::vector<Index> every_prompt_row(Index prompt) {
  std::vector<Index> rows(static_cast<std::size_t>(prompt));
  std::iota(rows.begin(), rows.end(), Index{0});
  return rows;
}

void apply(const SequenceArguments& arguments, const std::string& own_name, SequenceInfo& info) {
  info.name = arguments.name.empty() ? own_name : arguments.name;
  info.group = arguments.group.empty() ? info.name : arguments.group;
  if (arguments.prompt < 1 || arguments.prompt > info.tokens) {
    reject("prompt is ", arguments.prompt, ", expected 1 .. ", info.tokens,
           ", the tokens that were recorded");
  }
  info.prompt = arguments.prompt;
  info.prompt_rows = every_prompt_row(info.prompt);
  info.generated = info.steps() + 1;
  info.image = image_of_each_token(arguments.images, info.tokens);
}

void write_finite_head(TraceWriter& writer, const SequenceInfo& info, Index layer, LayerArray array,
                       Index head, std::span<const float> values, const std::string& place) {
  if (const std::optional<Index> wrong = first_not_finite(values)) {
    refuse(place, *wrong / *info.head_dim, ", ", *wrong % *info.head_dim,
           "]: found a NaN or infinity, expected finite numbers; record it again");
  }
  writer.write_head(layer, array, head, values);
}

void write_attention_head(TraceWriter& writer, const SequenceInfo& info, Index layer, Index head,
                          const SquareAttention& attention) {
  std::vector<float> prompt;
  std::vector<float> decode;
  prompt.reserve(static_cast<std::size_t>(info.prompt * info.prompt));
  decode.reserve(static_cast<std::size_t>(decode_length(info)));
  for (Index query = 0; query < info.tokens; ++query) {
    const std::span<const float> row = attention.next_row();
    const Range visible{0, query + 1};
    if (const std::optional<std::string> wrong = row_violation(row, {&visible, 1}, info.row_sum_tolerance)) {
      refuse(attention.place, query, "]: ", *wrong, "; ", attention.remedy);
    }
    if (query < info.prompt) {
      prompt.insert(prompt.end(), row.begin(), row.begin() + info.prompt);
    } else {
      decode.insert(decode.end(), row.begin(), row.begin() + query + 1);
    }
  }
  writer.write_head(layer, LayerArray::prompt, head, prompt);
  writer.write_head(layer, LayerArray::decode, head, decode);
}

std::string Numbering::name(Index number) const {
  std::string figures = text(number);
  const auto least = static_cast<std::size_t>(digits);
  return std::string(prefix) + std::string(least - std::min(least, figures.size()), '0') + figures;
}

std::optional<Index> Numbering::number(std::string_view of) const {
  Index value = -1;
  if (of.starts_with(prefix)) {
    std::from_chars(of.data() + prefix.size(), of.data() + of.size(), value);
  }
  return value >= 0 && value < most && name(value) == of ? std::optional(value) : std::nullopt;
}

std::vector<Index> numbers_of(const Numbering& numbering, std::span<const std::string> names,
                              const std::string& where) {
  std::vector<Index> numbers;
  for (const std::string& name : names) {
    const std::optional<Index> number = numbering.number(name);
    if (!number) {
      refuse(where, ": holds ", in_quotes(name), ", expected ", numbering.name(0), ", ", numbering.name(1),
             ", ...; remove or rename it");
    }
    numbers.push_back(*number);
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

void expect_numbered(const Numbering& numbering, std::span<const Index> numbers, Index count,
                     const std::string& where) {
  const auto found = static_cast<Index>(numbers.size());
  for (Index number = 0; number < std::max(count, found); ++number) {
    const bool there = number < found && numbers[static_cast<std::size_t>(number)] == number;
    if (there != (number < count)) {
      refuse(where, "/", numbering.name(number), there ? ": found" : ": missing", ", expected ",
             numbering.name(0), " .. ", numbering.name(count - 1),
             "; copy the recording again, or record every layer and head");
    }
  }
}

Index count_numbered(const Numbering& numbering, std::span<const Index> numbers, const std::string& where) {
  const Index count = numbers.empty() ? 1 : numbers.back() + 1;
  expect_numbered(numbering, numbers, count, where);
  return count;
}

}  // namespace hae::traces
