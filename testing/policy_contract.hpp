#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "testing/generators.hpp"

namespace hae::testing {

/// Makes the policy under test, a new object with the same options each time: what one object remembers
/// cannot reach the next case.
using MakePolicy = std::function<std::shared_ptr<const Policy>()>;

/// A policy breaks its contract. The message says how, on which trace, and how to meet that trace again.
class ContractFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One sentence of the contract.
struct PolicyProperty {
  std::string name;   ///< as a test is called
  std::string claim;  ///< what must hold
  Index traces = 1;   ///< how many traces it is about

  /// Whether it holds for a policy on these traces.
  ///
  /// throws  ContractFailure, saying how it does not; whatever else the policy or the engine throws,
  ///         ConfigError and NeedsError among them where the policy cannot run there at all
  std::function<void(const MakePolicy&, std::span<const MemoryTrace>)> check_on;
};

/// What holds for every policy on every trace.
std::vector<PolicyProperty> policy_contract();

/// What holds besides for a policy whose budget is open (Policy::budget_is_open).
std::vector<PolicyProperty> budget_contract();

/// How much is tried.
struct ContractOptions {
  TraceBounds traces = {};        ///< of the generated traces; what the policy needs is added
  Index cases = 100;              ///< generated cases of a property
  std::uint64_t seed = 20260202;  ///< of the generated traces: the same seed gives the same cases
  bool keeps_everything = false;  ///< the policy evicts nothing on such small traces, and that is right
};

/// The traces of edge_traces() that have what a policy needs, and on which its options are possible.
std::map<std::string, MemoryTrace> possible_edge_traces(const MakePolicy& make);

/// Checks one property: on generated traces that have what the policy needs, whose counterexample shrinks to
/// the smallest found that still fails, then on every trace of edge_traces() that it can run on.
///
/// throws  ContractFailure; also when fewer than one generated case in ten could be run
void check_property(const PolicyProperty& property, const MakePolicy& make,
                    const ContractOptions& options = {});

/// Fails when a policy evicted nothing on any trace: then no property was put to the test. With
/// keeps_everything it fails when something was evicted.
///
/// throws  ContractFailure
void check_evictions(const MakePolicy& make, const ContractOptions& options = {});

/// Everything above, for programs without a test framework; GoogleTest: testing/register_policy_contract.hpp.
///
/// throws  ContractFailure with a paragraph for each property that does not hold
void check_policy(const MakePolicy& make, const ContractOptions& options = {});

}  // namespace hae::testing
