#include <fmt/format.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sim/cli/command.hpp"
#include "sim/cli/model_shape.hpp"
#include "sim/cli/policy_source.hpp"

// The scripts ask this program what can stand where the cursor is, so that a shell knows every subcommand,
// option and policy that the program at hand has.

namespace hae::cli {
namespace {

namespace fs = std::filesystem;

// In bash, the words of the line were split at colons and equal signs: they are joined again, and what stands
// before the last of them is taken off the candidates, as bash replaces only what comes after it.
constexpr const char* kBash = R"(# Completion of hae for bash. In ~/.bashrc:  source <(hae completion bash)
_hae() {
  local words=() word glued=
  for word in "${COMP_WORDS[@]:0:COMP_CWORD+1}"; do
    if [[ ${#words[@]} -gt 0 && ( $glued || $word == [:=]* ) ]]; then
      words[-1]+=$word
    else
      words+=("$word")
    fi
    [[ $word == +([:=]) ]] && glued=1 || glued=
  done
  local current=${words[-1]} split= candidate
  [[ $COMP_WORDBREAKS == *:* ]] && split+=:
  [[ $COMP_WORDBREAKS == *=* ]] && split+==
  local before=
  [[ $split && $current == *[$split]* ]] && before=${current%"${current##*[$split]}"}
  COMPREPLY=()
  while IFS=$'\t' read -r candidate _; do
    [[ $candidate == *[:=] ]] && compopt -o nospace 2>/dev/null
    COMPREPLY+=("${candidate#"$before"}")
  done < <("${COMP_WORDS[0]/#\~/$HOME}" completion candidates -- "${words[@]}" 2>/dev/null)
}
complete -o default -F _hae hae
)";

constexpr const char* kZsh = R"(#compdef hae
# Completion of hae for zsh. In ~/.zshrc, after compinit:  source <(hae completion zsh)
_hae() {
  local line word
  local -a ended=() open=()  # open: more is typed behind it
  for line in "${(@f)$(${~words[1]} completion candidates -- "${(@)words[1,CURRENT]}" 2>/dev/null)}"; do
    word=${line%%$'\t'*}
    case $word in
      '') ;;
      *[:=]) open+=("${word//:/\\:}:${line#*$'\t'}") ;;
      *) ended+=("${word//:/\\:}:${line#*$'\t'}") ;;
    esac
  done
  if (( ${#ended} + ${#open} == 0 )); then
    compset -P '*='
    _files
    return
  fi
  _describe hae ended -- open -S ''
}
if [[ ${funcstack[1]} == _hae ]]; then
  _hae "$@"
else
  compdef _hae hae
fi
)";

constexpr const char* kFish =
    R"(# Completion of hae for fish. In ~/.config/fish/config.fish:  hae completion fish | source
function __hae_candidates
    set -l words (commandline -opc) (commandline -ct)
    set -l found ($words[1] completion candidates -- $words 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c hae -f -a '(__hae_candidates)'
)";

struct Candidate {
  std::string text;
  std::string meaning;
};

using Candidates = std::vector<Candidate>;

bool is_shown(const CLI::Option* option) {
  return !option->get_group().empty();
}

/// Programs hae-WORD on the path, which `hae WORD` runs.
std::set<std::string> foreign_commands() {
  constexpr std::string_view kPrefix = "hae-";
  std::set<std::string> words;
  const char* path = std::getenv("PATH");
  std::string_view folders = path == nullptr ? "" : path;
  while (!folders.empty()) {
    const std::size_t length = std::min(folders.find(':'), folders.size());
    std::error_code error;
    for (fs::directory_iterator entry(folders.substr(0, length), error), end; !error && entry != end;
         entry.increment(error)) {
      const std::string name = entry->path().filename().string();
      std::error_code unreadable;
      if (name.starts_with(kPrefix) && !entry->is_directory(unreadable) &&
          access(entry->path().c_str(), X_OK) == 0) {
        words.insert(name.substr(kPrefix.size()));
      }
    }
    folders.remove_prefix(std::min(length + 1, folders.size()));
  }
  return words;
}

Candidates commands(const CLI::App& app) {
  Candidates all;
  std::set<std::string> foreign = foreign_commands();
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    all.push_back({command->get_name(), command->get_description()});
    foreign.erase(command->get_name());
  }
  for (const std::string& word : foreign) {
    all.push_back({word, "the program hae-" + word});
  }
  return all;
}

Candidates option_names(const CLI::App& command) {
  Candidates all;
  for (const CLI::Option* option : command.get_options(is_shown)) {
    for (const std::string& name : option->get_lnames()) {
      all.push_back({"--" + name, option->get_description()});
    }
    for (const std::string& name : option->get_snames()) {
      all.push_back({"-" + name, option->get_description()});
    }
  }
  return all;
}

Candidates policy_names() {
  Candidates all;
  for (const reference::PolicyInfo& info : known_policies()) {
    all.push_back({std::string(info.name), std::string(info.summary)});
  }
  return all;
}

/// A policy by its name; behind the colon, and each comma, one of its options that is not given yet.
Candidates policy_specs(std::string_view begun) {
  Candidates all;
  for (const reference::PolicyInfo& info : known_policies()) {
    const std::string name(info.name);
    if (begun.starts_with(name + ":")) {
      const std::string given(begun.substr(0, begun.find_last_of(":,") + 1));
      for (const reference::OptionInfo& option : info.options) {
        const std::string setting = std::string(option.key) + "=";
        const bool is_given =
            given.find(":" + setting) != std::string::npos || given.find("," + setting) != std::string::npos;
        if (!is_given) {
          all.push_back({given + setting, std::string(option.meaning)});
        }
      }
    }
    all.push_back({name, std::string(info.summary)});
    if (!info.options.empty()) {
      all.push_back({name + ":", std::string(info.summary)});
    }
  }
  return all;
}

/// The choices that a check for membership names in braces at the end of a type's name.
Candidates choices(const std::string& type) {
  Candidates all;
  const std::size_t begin = type.find('{');
  if (begin == std::string::npos || !type.ends_with('}')) {
    return all;
  }
  for (const std::string& choice : CLI::detail::split(type.substr(begin + 1, type.size() - begin - 2), ',')) {
    all.push_back({choice, ""});
  }
  return all;
}

/// None where a value may be anything, as a file is.
Candidates values(const CLI::Option& option, std::string_view begun) {
  const std::string type = option.get_type_name();
  if (type == kPolicySpec) {
    return policy_specs(begun);
  }
  if (type == kPolicyName) {
    return policy_names();
  }
  Candidates all = choices(type);
  if (type == kModelName) {
    for (const ModelShape& model : model_shapes()) {
      all.push_back({model.name, model.source});
    }
  }
  return all;
}

/// The option whose value comes behind a word, if the word names one.
const CLI::Option* awaiting(const CLI::App& command, const std::string& word) {
  const CLI::Option* option = word.starts_with('-') ? command.get_option_no_throw(word) : nullptr;
  return option != nullptr && option->get_items_expected_max() > 0 ? option : nullptr;
}

/// The positional argument that a word stands for.
///
/// words  from the subcommand up to that word
const CLI::Option* positional(const CLI::App& command, const std::vector<std::string>& words) {
  std::size_t before = 0;
  for (std::size_t w = 1; w + 1 < words.size(); ++w) {
    before += !words[w].starts_with('-') && awaiting(command, words[w - 1]) == nullptr ? 1 : 0;
  }
  const auto all = command.get_options(
      [](const CLI::Option* option) { return option->get_positional() && is_shown(option); });
  if (all.empty()) {
    return nullptr;
  }
  const CLI::Option* const last = all.back();
  return before < all.size() ? all[before] : (last->get_items_expected_max() > 1 ? last : nullptr);
}

/// What can stand for the last word, also what does not begin as it does.
Candidates possible(const CLI::App& app, const std::vector<std::string>& words) {
  const std::string& current = words.back();
  if (words.size() <= 2) {
    return current.starts_with('-') ? option_names(app) : commands(app);
  }
  const auto named = app.get_subcommands([&](const CLI::App* c) { return c->get_name() == words[1]; });
  if (named.empty()) {
    return {};
  }
  const CLI::App& command = *named.front();
  if (const CLI::Option* option = awaiting(command, words[words.size() - 2])) {
    return values(*option, current);
  }
  if (const std::size_t equals = current.find('=');
      current.starts_with("--") && equals != std::string::npos) {
    Candidates all;
    if (const CLI::Option* option = awaiting(command, current.substr(0, equals))) {
      all = values(*option, std::string_view(current).substr(equals + 1));
    }
    for (Candidate& candidate : all) {
      candidate.text.insert(0, current, 0, equals + 1);
    }
    return all;
  }
  if (current.starts_with('-')) {
    return option_names(command);
  }
  const CLI::Option* option = positional(command, {words.begin() + 1, words.end()});
  return option == nullptr ? Candidates{} : values(*option, current);
}

}  // namespace

bool answer_completion(const CLI::App& app, const std::vector<std::string>& arguments) {
  // Ahead of CLI11, which would take the user's words for its own.
  const std::vector<std::string> asking{"completion", "candidates", "--"};
  if (arguments.size() <= asking.size() ||
      !std::ranges::equal(asking, std::span(arguments).first(asking.size()))) {
    return false;
  }
  const std::vector<std::string> words(arguments.begin() + 3, arguments.end());
  for (const Candidate& candidate : possible(app, words)) {
    if (candidate.text.starts_with(words.back())) {
      fmt::print("{}\t{}\n", candidate.text, candidate.meaning);
    }
  }
  return true;
}

void add_completion(CLI::App& app) {
  auto shell = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand(
      "completion", "Print a script that makes a shell complete commands, options and policies");
  command->add_option("shell", *shell, "The shell")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  command->footer(
      "Examples:\n"
      "  source <(hae completion bash)     # in ~/.bashrc\n"
      "  source <(hae completion zsh)      # in ~/.zshrc, after compinit\n"
      "  hae completion fish | source      # in ~/.config/fish/config.fish");
  command->callback([shell] {
    std::fputs(*shell == "bash" ? kBash : *shell == "zsh" ? kZsh : kFish, stdout);
  });
}

}  // namespace hae::cli
