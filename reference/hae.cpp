#include "reference/policies.hpp"
#include "reference/recycle_bin.hpp"
#include "reference/shared_options.hpp"

// Hierarchical Adaptive Eviction, arXiv 2602.02197: DAP in the prefill, DDES while decoding.

namespace hae::reference {
namespace {

constexpr auto kOptions = concatenate(
    pruning_options("threshold"),
    std::array{
        OptionInfo{"ddes", "mark", "mark, batch or none", "eviction while decoding (DDES)"}, kBudgetOption,
        OptionInfo{"bin", "15%", "a count of 1 or more, or a share of the budget (0.15 or 15%)",
                   "D: capacity of the recycle bin"},
        kSinksOption,
        OptionInfo{
            "recent", "auto", "a count of 0 or more, or auto",
            "the newest residents, never evicted by score; auto: 1 with mark, min(D, l - sinks) with batch"}},
    kScoreOptions);

RecycleBin parse_bin(const Options& options) {
  using Mode = RecycleBin::Mode;
  RecycleBin bin;
  bin.mode = options.choose<Mode>("ddes", {{"mark", Mode::mark}, {"batch", Mode::batch}});
  bin.capacity = options.amount("bin");
  if (options.text("recent") != "auto") {
    bin.recent = options.count("recent", 0);
  }
  return bin;
}

std::shared_ptr<const Policy> make(Options options) {
  ScorePolicy::Config config;
  config.pruning = parse_pruning(options);
  config.sinks = options.count("sinks", 0);
  if (options.text("ddes") == "none") {
    config.scores.reduction.lanes = parse_lane(options);
    options.exclude({"budget", "bin", "recent", "group", "score", "scores"}, "ddes=none");
  } else {
    config.scores = parse_scores(options);
    config.rule = make_recycle_bin_rule(parse_bin(options));
  }
  return std::make_shared<ScorePolicy>(std::move(options), std::move(config), make);
}

}  // namespace

const PolicyInfo kHae = {
    "hae",
    "Hierarchical Adaptive Eviction: prunes visual tokens in the prefill (DAP), then a recycle bin while "
    "decoding (DDES)",
    "HAE, arXiv 2602.02197: Eq. (1)-(3) for DAP; Fig. 1, Def. 2 and Eq. (4)-(5) for DDES",
    "Online. Written from the paper, which has no public code; where it is ambiguous the default is our "
    "reading and the others are options (reference/README.md). dap=mass and score=mean are ours. Needs all "
    "prompt rows; with ddes=none only those of prompt text.",
    kOptions,
    make};

}  // namespace hae::reference
