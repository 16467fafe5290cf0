#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <optional>

#include "reference/cumulative_scores.hpp"
#include "reference/dual_attention_pruning.hpp"
#include "reference/options.hpp"

// Lines of the option tables that several policies share, and their parsing.

namespace hae::reference {

/// One table from several.
template <std::size_t... Sizes>
constexpr auto concatenate(const std::array<OptionInfo, Sizes>&... parts) {
  std::array<OptionInfo, (Sizes + ...)> all{};
  auto end = all.begin();
  ((end = std::copy(parts.begin(), parts.end(), end)), ...);
  return all;
}

inline constexpr std::array kPruningOnlyOptions = {
    OptionInfo{"r", "0.0015", "a number of 0 or more",
               "threshold: evict below this share of A_V (strict), and"},
    OptionInfo{"alpha", "0.0005", "a number of 0 or more",
               "below this attention in every text row (strict); with mass: none by default"},
    OptionInfo{"eps", "-", "a number of 0 or more", "mass: the share of A_V that may be lost"},
    OptionInfo{"heads", "mean", "mean or max", "how query heads become a_ij"},
    OptionInfo{"scope", "sequence", "sequence or image", "A_V over all pictures, or of each picture"},
    OptionInfo{"max_evicted", "none", "a count of 0 or more, or none", "most tokens one decision may evict"},
    OptionInfo{"broadcast", "all", "all or none", "layer 0 decides for all layers, or each layer for itself"},
    OptionInfo{"effect", "within", "within or after",
               "later layers never see the evicted tokens, or lose them when their prefill is over"},
};

/// Options of the pruning stage.
constexpr auto pruning_options(std::string_view default_rule) {
  return concatenate(std::array{OptionInfo{"dap", default_rule, "threshold, mass or none",
                                           "pruning of visual tokens in the prefill (DAP)"}},
                     kPruningOnlyOptions);
}

inline constexpr OptionInfo kBudgetOption = {
    "budget", "prompt", "a count of 1 or more, a share (0.15 or 15%) of the lane's prompt tokens, or prompt",
    "l: residents a lane holds; prompt: its size after pruning"};

/// A budget that has no default.
inline constexpr OptionInfo kRequiredBudgetOption = {
    "budget", "-", "a count of 1 or more, or a share (0.15 or 15%) of the lane's prompt tokens",
    "residents a lane holds; required, unless it is matched"};

inline constexpr OptionInfo kSinksOption = {"sinks", "0", "a count of 0 or more",
                                            "positions 0 .. sinks-1 are never evicted"};

/// Sinks and a window as StreamingLLM and those after it have them.
inline constexpr OptionInfo kStreamSinksOption = {"sinks", "4", "a count of 0 or more",
                                                  "positions 0 .. sinks-1 are never evicted"};
inline constexpr OptionInfo kTenRecentOption = {"recent", "10", "a count of 0 or more",
                                                "the newest residents, never evicted"};
inline constexpr OptionInfo kHalfRecentOption = {
    "recent", "auto", "a count of 0 or more, or auto",
    "R: the newest residents, never evicted; auto: half the budget, at least 1"};

/// Lanes of policies that were made for one KV head a query head.
inline constexpr OptionInfo kHeadLaneOption = {"lane", "kv_head", "kv_head or layer",
                                               "what evicts on its own"};
inline constexpr OptionInfo kGroupOption = {"group", "mean", "mean, max or sum",
                                            "how the query heads of a KV head lane become one row"};

inline constexpr OptionInfo kSeedOption = {"seed", "0", "a whole number of 0 or more", "which random draws"};

/// Options of what a score is.
inline constexpr std::array kScoreOptions = {
    OptionInfo{"lane", "layer", "layer or kv_head", "what evicts on its own"},
    kGroupOption,
    OptionInfo{"score", "sum", "sum or mean",
               "cumulative attention, or that per row that could see the token"},
    OptionInfo{"scores", "observed", "observed or full",
               "attention over the residents, as a cache sees it, or over all tokens, as theory assumes"},
};

/// The pruning stage; none with dap=none, whose other options then have no meaning.
std::optional<PruningOptions> parse_pruning(Options& options);
ScoreOptions parse_scores(const Options& options);
LaneKind parse_lane(const Options& options);
HeadReduction parse_group(const Options& options);

/// `lane` and `group`.
Reduction parse_head_reduction(const Options& options);

/// How many of the newest residents are protected under a budget.
using RecentOfBudget = std::function<Index(Index budget)>;

/// `recent`: a count, or `auto`: half the budget, at least 1.
RecentOfBudget parse_recent(const Options& options);

/// `budget`: a count, or a share of what a lane holds when its prefill's pruning is over; none where it says
/// `prompt`, says nothing and has no default, or is not in the table.
std::optional<Amount> parse_budget(const Options& options);

}  // namespace hae::reference
