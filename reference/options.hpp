#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sim/view.hpp"

namespace hae::reference {

/// One option of a policy, as `hae policies NAME` shows it.
struct OptionInfo {
  std::string_view key;
  std::string_view default_value;
  std::string_view allowed;
  std::string_view meaning;
};

/// A share as it was written: 0.15 is 15/100.
struct Fraction {
  Index numerator = 0;
  Index denominator = 1;
};

/// A number of tokens, or a share of a number of tokens kept as an exact decimal: 15 % of 100 is 15,
/// never 14.
class Amount {
 public:
  static Amount of_tokens(Index tokens) { return {tokens, 0}; }

  /// Parses `64`, `0.15` or `15%`; none if it is neither, or not above zero.
  static std::optional<Amount> parse(std::string_view text);

  /// Whether it is a share of more than the whole.
  [[nodiscard]] bool exceeds_whole() const { return denominator_ > 0 && numerator_ > denominator_; }

  /// The number of tokens; none for a share.
  [[nodiscard]] std::optional<Index> tokens() const {
    return denominator_ == 0 ? std::optional(numerator_) : std::nullopt;
  }

  /// The share; none for a number of tokens.
  [[nodiscard]] std::optional<Fraction> share() const {
    return denominator_ == 0 ? std::nullopt : std::optional(Fraction{numerator_, denominator_});
  }

  /// The number, or the share of `whole`: rounded down, at least 1.
  [[nodiscard]] Index of(Index whole) const;

 private:
  Amount(Index numerator, Index denominator) : numerator_(numerator), denominator_(denominator) {}

  Index numerator_;
  Index denominator_;  ///< 0: a number of tokens
};

/// The options of one policy as a user gave them, checked against its table.
///
/// Every error is a ConfigError that names policy, key, value and what is allowed.
class Options {
 public:
  /// spec: `name` or `name:key=value,key=value`.
  Options(std::string_view spec, std::span<const OptionInfo> table);

  /// The part of a spec before the colon.
  static std::string_view name_of(std::string_view spec);

  [[nodiscard]] const std::string& name() const { return name_; }

  /// Name and given options, in the order of the table, values as the user spelled them.
  [[nodiscard]] std::string canonical() const;

  /// Every option in the order of the table; `-` where another option makes it meaningless.
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> all() const;

  /// Whether the policy has such an option, and whether the user gave it.
  [[nodiscard]] bool has(std::string_view key) const;
  [[nodiscard]] bool given(std::string_view key) const;
  [[nodiscard]] const std::string& text(std::string_view key) const { return find(key).value; }
  [[nodiscard]] std::string_view default_of(std::string_view key) const {
    return find(key).info->default_value;
  }

  [[nodiscard]] Index count(std::string_view key, Index least) const;
  [[nodiscard]] std::uint64_t seed(std::string_view key) const;
  [[nodiscard]] double threshold(std::string_view key) const;
  [[nodiscard]] Amount amount(std::string_view key) const;

  /// The items of a list `a/b/c`, in order.
  [[nodiscard]] std::vector<Index> counts(std::string_view key, Index least) const;
  [[nodiscard]] std::vector<Amount> amounts(std::string_view key) const;

  /// The choice whose name the option has.
  template <typename Choice>
  [[nodiscard]] Choice choose(std::string_view key,
                              std::initializer_list<std::pair<std::string_view, Choice>> choices) const {
    for (const auto& [name, choice] : choices) {
      if (text(key) == name) {
        return choice;
      }
    }
    fail(key);
  }

  /// Declares options that `reason` makes meaningless: an error if one was given, else `-`.
  void exclude(std::initializer_list<std::string_view> keys, std::string_view reason);

  /// Replaces the value of an option without counting it as given, e.g. by a matched budget.
  void resolve(std::string_view key, std::string value) { find(key).value = std::move(value); }

  /// ConfigError that names the key and what is allowed, or the complaint.
  [[noreturn]] void fail(std::string_view key) const;
  [[noreturn]] void fail(std::string_view key, std::string_view complaint) const;

 private:
  struct Option {
    const OptionInfo* info;
    std::string value;
    bool given = false;
  };

  [[nodiscard]] const Option& find(std::string_view key) const;
  [[nodiscard]] Option& find(std::string_view key) {
    return const_cast<Option&>(static_cast<const Options&>(*this).find(key));
  }

  std::string name_;
  std::vector<Option> options_;
};

}  // namespace hae::reference
