#include <algorithm>
#include <iterator>
#include <sstream>
#include <utility>

#include "testing/edge_traces.hpp"
#include "testing/policy_contract.hpp"

namespace hae::testing {
namespace {

/// Runs what may be impossible for a policy on a trace.
///
/// returns  whether it was possible
template <typename Task>
bool possibly(const Task& task) {
  try {
    task();
    return true;
  } catch (const NeedsError&) {
    return false;
  } catch (const ConfigError&) {
    return false;
  }
}

std::string described(const PolicyProperty& property, const std::string& how) {
  return property.claim + ", but " + how;
}

void check_on_edges(const PolicyProperty& property, const MakePolicy& make) {
  const std::map<std::string, MemoryTrace> edges = possible_edge_traces(make);
  const auto check = [&](const std::string& names, const std::vector<MemoryTrace>& traces) {
    try {
      (void)possibly([&] { property.check_on(make, traces); });
    } catch (const std::exception& error) {
      throw ContractFailure(described(property, "on " + names + " it does not hold:\n" + error.what()));
    }
  };
  const std::pair<const std::string, MemoryTrace>* previous = nullptr;
  for (const auto& entry : edges) {
    if (property.traces == 1) {
      check("the edge trace '" + entry.first + "'", {entry.second});
    } else if (previous != nullptr) {
      check("'" + previous->first + "', then '" + entry.first + "'", {previous->second, entry.second});
      check("'" + entry.first + "', then '" + previous->first + "'", {entry.second, previous->second});
    }
    previous = &entry;
  }
}

/// RapidCheck reports to a listener, as its integrations with test frameworks have one. Here the result is
/// enough.
class Silent final : public rc::detail::TestListener {
 public:
  void onTestCaseFinished(const rc::detail::CaseDescription& /*description*/) override {}
  void onShrinkTried(const rc::detail::CaseDescription& /*shrink*/, bool /*accepted*/) override {}
  void onTestFinished(const rc::detail::TestMetadata& /*metadata*/,
                      const rc::detail::TestResult& /*result*/) override {}
};

/// Calls `check` with generated traces until it throws, then with ever smaller ones.
///
/// returns  what there is to say about the smallest on which it throws; nothing if it never does
template <typename Check>
std::string counterexample(const MakePolicy& make, const ContractOptions& options, Index traces,
                           const Check& check) {
  const rc::Gen<MemoryTrace> generated = traces_for(*make(), options.traces);
  rc::detail::TestParams params;
  params.seed = options.seed;
  params.maxSuccess = static_cast<int>(options.cases);
  Silent silent;
  const auto draw_and_check = [&] {
    std::vector<MemoryTrace> drawn;
    for (Index i = 0; i < traces; ++i) {
      drawn.push_back(*generated);
    }
    check(drawn);
  };
  const rc::detail::TestResult result =
      rc::detail::checkProperty(rc::detail::toProperty(draw_and_check), {}, params, silent, {});
  if (result.is<rc::detail::SuccessResult>()) {
    return {};
  }
  std::ostringstream text;
  text << "with seed " << options.seed << " it does not hold:\n";
  rc::detail::printResultMessage(result, text);
  return text.str();
}

}  // namespace

std::map<std::string, MemoryTrace> possible_edge_traces(const MakePolicy& make) {
  std::map<std::string, MemoryTrace> possible = edge_traces();
  std::erase_if(possible, [&](const auto& entry) {
    try {
      return !possibly([&] { (void)run(entry.second, make()); });
    } catch (const std::exception&) {
      return false;  // What else goes wrong there is for a property to report.
    }
  });
  return possible;
}

void check_property(const PolicyProperty& property, const MakePolicy& make, const ContractOptions& options) {
  Index cases = 0;
  Index ran = 0;
  const std::string found =
      counterexample(make, options, property.traces, [&](const std::vector<MemoryTrace>& traces) {
        ++cases;
        ran += possibly([&] { property.check_on(make, traces); }) ? 1 : 0;
      });
  if (!found.empty()) {
    throw ContractFailure(described(property, found));
  }
  if (ran * 10 < cases) {
    throw ContractFailure(described(
        property, "the policy could run on " + std::to_string(ran) + " of " + std::to_string(cases) +
                      " generated traces only; options that need more tokens than a trace has are "
                      "impossible there, so raise traces.least_tokens"));
  }
  check_on_edges(property, make);
}

void check_evictions(const MakePolicy& make, const ContractOptions& options) {
  std::size_t evictions = 0;
  const auto count = [&](const MemoryTrace& trace) {
    (void)possibly([&] { evictions += run(trace, make()).log.entries.size(); });
  };
  for (const auto& [name, trace] : possible_edge_traces(make)) {
    count(trace);
  }
  const std::string found = counterexample(
      make, options, 1, [&](const std::vector<MemoryTrace>& traces) { count(traces.front()); });
  if (!found.empty()) {
    throw ContractFailure("a policy runs on every trace that has what it needs, but " + found);
  }
  if (evictions == 0 && !options.keeps_everything) {
    throw ContractFailure(
        "nothing was evicted on any trace, so no property was put to the test; give the policy a smaller "
        "budget, or raise traces.most_tokens; a policy that keeps everything says keeps_everything");
  }
  if (evictions > 0 && options.keeps_everything) {
    throw ContractFailure("keeps_everything is said of a policy with " + std::to_string(evictions) +
                          " evictions");
  }
}

void check_policy(const MakePolicy& make, const ContractOptions& options) {
  std::vector<PolicyProperty> properties = policy_contract();
  if (make()->budget_is_open()) {
    std::ranges::copy(budget_contract(), std::back_inserter(properties));
  }
  std::string failures;
  const auto collect = [&](const std::string& name, const auto& check) {
    try {
      check();
    } catch (const ContractFailure& failure) {
      failures += name + ": " + failure.what() + "\n\n";
    }
  };
  for (const PolicyProperty& property : properties) {
    collect(property.name, [&] { check_property(property, make, options); });
  }
  collect("ItEvicts", [&] { check_evictions(make, options); });
  if (!failures.empty()) {
    throw ContractFailure(failures);
  }
}

}  // namespace hae::testing
