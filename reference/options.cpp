#include "reference/options.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>

#include "sim/errors.hpp"

namespace hae::reference {
namespace {

/// Parses the whole text as a number; none if anything is left over or out of range.
template <typename Number>
std::optional<Number> parse_number(std::string_view text) {
  Number number{};
  const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  if (result.ec != std::errc{} || result.ptr != text.data() + text.size()) {
    return std::nullopt;
  }
  return number;
}

/// The parts between slashes.
std::vector<std::string_view> items(std::string_view list) {
  std::vector<std::string_view> items;
  for (std::size_t slash = 0; slash != std::string_view::npos;) {
    slash = list.find('/');
    items.push_back(list.substr(0, slash));
    list.remove_prefix(slash == std::string_view::npos ? list.size() : slash + 1);
  }
  return items;
}

constexpr Index kLargestCount = Index{1} << 48;

constexpr std::size_t kMostDigits = 15;  // keeps numerator * tokens within 128 bits and 10^digits within 64

}  // namespace

std::optional<Amount> Amount::parse(std::string_view text) {
  const bool percent = text.ends_with('%');
  const std::string_view number = percent ? text.substr(0, text.size() - 1) : text;
  const std::size_t point = number.find('.');
  std::string digits(number.substr(0, point));
  const std::size_t whole_digits = digits.size();
  if (point != std::string_view::npos) {
    digits += number.substr(point + 1);
  }
  const bool is_share = percent || point != std::string_view::npos;
  const bool all_digits = std::ranges::all_of(digits, [](char c) { return c >= '0' && c <= '9'; });
  if (digits.empty() || digits.size() > kMostDigits || !all_digits) {
    return std::nullopt;
  }
  const Index numerator = parse_number<Index>(digits).value_or(0);
  if (numerator == 0) {
    return std::nullopt;
  }
  if (!is_share) {
    return of_tokens(numerator);
  }
  Index denominator = percent ? 100 : 1;
  for (std::size_t i = whole_digits; i < digits.size(); ++i) {
    denominator *= 10;
  }
  constexpr Index kLargestShare = 1000;  // of the whole: more is a slip, and could overflow
  if (numerator / denominator > kLargestShare) {
    return std::nullopt;
  }
  return Amount(numerator, denominator);
}

Index Amount::of(Index whole) const {
  if (denominator_ == 0) {
    return numerator_;
  }
  const WideIndex share = static_cast<WideIndex>(numerator_) * whole / denominator_;
  return std::max<Index>(1, static_cast<Index>(share));
}

std::string_view Options::name_of(std::string_view spec) {
  return spec.substr(0, spec.find(':'));
}

Options::Options(std::string_view spec, std::span<const OptionInfo> table) : name_(name_of(spec)) {
  for (const OptionInfo& info : table) {
    options_.push_back({&info, std::string(info.default_value), false});
  }
  if (name_.size() == spec.size()) {
    return;
  }
  std::string_view rest = spec.substr(name_.size());
  while (!rest.empty()) {
    rest.remove_prefix(1);  // the colon or a comma
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(item.size());
    const std::string_view key = item.substr(0, item.find('='));
    if (key.empty() || key.size() == item.size()) {
      throw ConfigError("policy '" + std::string(spec) + "': '" + std::string(item) +
                        "' is not key=value; write " + name_ + ":key=value,key=value");
    }
    Option& option = find(key);
    if (option.given) {
      fail(key, "is given twice; give it once");
    }
    option.value = item.substr(key.size() + 1);
    option.given = true;
    if (option.value.empty()) {
      fail(key);
    }
  }
}

std::string Options::canonical() const {
  std::string spec = name_;
  char separator = ':';
  for (const Option& option : options_) {
    if (option.given) {
      spec += separator;
      spec += option.info->key;
      spec += '=';
      spec += option.value;
      separator = ',';
    }
  }
  return spec;
}

std::vector<std::pair<std::string, std::string>> Options::all() const {
  std::vector<std::pair<std::string, std::string>> all;
  for (const Option& option : options_) {
    all.emplace_back(option.info->key, option.value);
  }
  return all;
}

bool Options::has(std::string_view key) const {
  return std::ranges::any_of(options_, [&](const Option& option) { return option.info->key == key; });
}

bool Options::given(std::string_view key) const {
  return find(key).given;
}

Index Options::count(std::string_view key, Index least) const {
  const std::optional<Index> number = parse_number<Index>(text(key));
  if (!number || *number < least || *number > kLargestCount) {
    fail(key);
  }
  return *number;
}

std::uint64_t Options::seed(std::string_view key) const {
  const std::optional<std::uint64_t> number = parse_number<std::uint64_t>(text(key));
  if (!number) {
    fail(key);
  }
  return *number;
}

double Options::threshold(std::string_view key) const {
  const std::optional<double> number = parse_number<double>(text(key));
  if (!number || !std::isfinite(*number) || *number < 0.0) {
    fail(key);
  }
  return *number;
}

Amount Options::amount(std::string_view key) const {
  const std::optional<Amount> amount = Amount::parse(text(key));
  if (!amount) {
    fail(key);
  }
  return *amount;
}

std::vector<Index> Options::counts(std::string_view key, Index least) const {
  std::vector<Index> counts;
  for (const std::string_view item : items(text(key))) {
    const std::optional<Index> number = parse_number<Index>(item);
    if (!number || *number < least || *number > kLargestCount) {
      fail(key);
    }
    counts.push_back(*number);
  }
  return counts;
}

std::vector<Amount> Options::amounts(std::string_view key) const {
  std::vector<Amount> amounts;
  for (const std::string_view item : items(text(key))) {
    const std::optional<Amount> amount = Amount::parse(item);
    if (!amount) {
      fail(key);
    }
    amounts.push_back(*amount);
  }
  return amounts;
}

void Options::exclude(std::initializer_list<std::string_view> keys, std::string_view reason) {
  for (const std::string_view key : keys) {
    if (given(key)) {
      fail(key, "has no meaning with " + std::string(reason) + "; leave one of them out");
    }
    resolve(key, "-");
  }
}

void Options::fail(std::string_view key) const {
  const Option& option = find(key);
  throw ConfigError("policy '" + name_ + "': " + std::string(key) + "=" + option.value +
                    " is not allowed; expected " + std::string(option.info->allowed));
}

void Options::fail(std::string_view key, std::string_view complaint) const {
  throw ConfigError("policy '" + name_ + "': option '" + std::string(key) + "' " + std::string(complaint));
}

const Options::Option& Options::find(std::string_view key) const {
  const auto option = std::ranges::find_if(options_, [&](const Option& o) { return o.info->key == key; });
  if (option == options_.end()) {
    std::string known;
    for (const Option& o : options_) {
      known += (known.empty() ? "" : ", ") + std::string(o.info->key);
    }
    throw ConfigError("policy '" + name_ + "': unknown option '" + std::string(key) + "'; " +
                      (known.empty() ? "it has none" : "expected one of " + known));
  }
  return *option;
}

}  // namespace hae::reference
