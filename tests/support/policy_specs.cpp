#include "tests/support/policy_specs.hpp"

#include <algorithm>

#include "reference/policies.hpp"

namespace hae::testing {
namespace {

Index draw(Index low, Index high) {
  return *rc::gen::inRange<Index>(low, high + 1);
}

std::string option(const std::string& key, const std::string& value) {
  return key + "=" + value + ",";
}

/// Options of pruning; empty for the policy's default.
std::string draw_pruning() {
  const std::string rule = *rc::gen::element<std::string>("none", "threshold", "threshold", "mass");
  std::string spec = option("dap", rule);
  if (rule == "none") {
    return spec;
  }
  if (rule == "mass") {
    spec += option("eps", *rc::gen::element<std::string>("0", "0.05", "0.3", "1"));
  } else {
    spec += option("r", *rc::gen::element<std::string>("0.01", "0.1", "0.5"));
    spec += option("alpha", *rc::gen::element<std::string>("0.05", "0.5", "2"));
  }
  spec += option("heads", *rc::gen::element<std::string>("mean", "max"));
  spec += option("scope", *rc::gen::element<std::string>("sequence", "image"));
  spec += option("max_evicted", *rc::gen::element<std::string>("none", "none", "2"));
  const std::string broadcast = *rc::gen::element<std::string>("all", "all", "none");
  spec += option("broadcast", broadcast);
  return broadcast == "all" ? spec + option("effect", *rc::gen::element<std::string>("within", "after"))
                            : spec;
}

std::string draw_scores() {
  const std::string lane = *rc::gen::element<std::string>("layer", "kv_head");
  const std::string group = lane == "layer" ? "mean" : *rc::gen::element<std::string>("mean", "max", "sum");
  return option("lane", lane) + option("group", group) +
         option("score", *rc::gen::element<std::string>("sum", "mean")) +
         option("scores", *rc::gen::element<std::string>("observed", "full"));
}

}  // namespace

std::optional<RunResult> possible_run(const MemoryTrace& trace, const std::string& spec,
                                      const ReplayOptions& options) {
  try {
    return run(trace, spec, options);
  } catch (const ConfigError&) {
    return std::nullopt;
  }
}

std::vector<RunResult> run_all(const MemoryTrace& trace, const std::vector<std::string>& specs,
                               const ReplayOptions& options) {
  std::vector<std::shared_ptr<const Policy>> policies;
  for (const std::string& spec : specs) {
    policies.push_back(reference::make_policy(spec));
  }
  MemorySequence sequence(trace);
  return replay(sequence, policies, options, "memory");
}

RunResult run(const MemoryTrace& trace, const std::string& spec, const ReplayOptions& options) {
  return run_all(trace, {spec}, options).front();
}

ClosedLoop::Finished run_closed(const MemoryTrace& trace, const std::string& spec, Index steps) {
  return run_closed(trace, reference::make_policy(spec), steps);
}

rc::Gen<std::string> policy_specs(const SequenceInfo& info) {
  return rc::gen::exec([info] {
    const std::string policy = *rc::gen::element<std::string>(
        "hae", "hae", "hae", "greedy", "h2o/layerwise", "window", "random", "full", "tova", "h2o/flexgen",
        "h2o/history", "scissorhands", "nacl", "fastv", "fastv/text-mean", "sparsevlm", "mustdrop");
    const Index budget = draw(2, std::max<Index>(2, info.tokens));
    const std::string budget_text = std::to_string(budget);
    std::string spec = policy + ":";
    if (policy == "hae") {
      spec +=
          draw_pruning() + draw_scores() + option("ddes", *rc::gen::element<std::string>("mark", "batch"));
      spec += option("bin", *rc::gen::element<std::string>("1", "2", "5", "15%", "0.5"));
      spec += option("budget", budget_text) + option("sinks", std::to_string(draw(0, 1)));
    } else if (policy == "greedy") {
      spec += draw_pruning() + draw_scores();
      spec += option("budget", budget_text) + option("recent", std::to_string(draw(0, 1))) +
              option("sinks", std::to_string(draw(0, 1)));
    } else if (policy == "h2o/layerwise") {
      spec += option("budget", budget_text);
    } else if (policy == "window") {
      spec += option("budget", budget_text) + option("sinks", std::to_string(draw(0, 2)));
    } else if (policy == "random") {
      spec += option("budget", budget_text) + option("seed", std::to_string(draw(0, 3))) +
              option("lane", *rc::gen::element<std::string>("layer", "kv_head"));
    } else if (policy == "fastv" || policy == "fastv/text-mean") {
      spec += option("layer", "1") + option("keep", *rc::gen::element<std::string>("1", "2", "50%")) +
              option("scope", *rc::gen::element<std::string>("sequence", "image")) +
              option("effect", *rc::gen::element<std::string>("within", "after"));
    } else if (policy == "sparsevlm") {
      spec += option("layers", "1") + option("keep", *rc::gen::element<std::string>("1", "2", "50%"));
    } else if (policy == "mustdrop") {
      spec += option("layers", *rc::gen::element<std::string>("0", "0/1", "1/2")) +
              option("tau_global", *rc::gen::element<std::string>("0.1", "0.5", "2")) +
              option("tau_individual", *rc::gen::element<std::string>("0.1", "1.5"));
    } else if (policy == "tova" || policy == "h2o/flexgen") {
      spec += option("budget", budget_text);
    } else if (policy != "full") {
      spec += option("budget", budget_text) + option("sinks", std::to_string(draw(0, 1))) +
              option("recent", std::to_string(draw(0, 1)));
      spec +=
          policy == "scissorhands" ? option("select", *rc::gen::element<std::string>("top", "sample")) : "";
    }
    spec.pop_back();
    return spec;
  });
}

}  // namespace hae::testing
