#include "validate/validate.hpp"

#include <algorithm>

#include "sim/errors.hpp"

namespace hae::validate {
namespace {

Index elements_of(const Problem& problem) {
  Index elements = 0;
  for (const Tensor& tensor : problem.inputs) {
    elements += std::ssize(tensor.values);
  }
  return elements;
}

/// The problem with only these of its outputs; an array that is in and out goes with its output.
Problem asking_for(const std::vector<std::string>& outputs, Problem problem) {
  const auto is_asked = [&](const std::string& name) {
    return outputs.empty() || is_essential(name) || std::ranges::count(outputs, name) > 0;
  };
  for (const Tensor& output : std::vector(problem.outputs)) {
    if (!is_asked(output.name)) {
      const std::string moved = output.name.substr(0, output.name.rfind("_out"));
      std::erase_if(problem.inputs, [&](const Tensor& input) {
        return input.name == output.name || (moved != output.name && input.name == moved);
      });
    }
  }
  std::erase_if(problem.outputs, [&](const Tensor& output) { return !is_asked(output.name); });
  return problem;
}

/// The counterexample to begin from: least to call again and again.
const Outcome& least_failing(const std::vector<Outcome>& outcomes) {
  const Outcome* least = nullptr;
  Index size = 0;
  for (const Outcome& outcome : outcomes) {
    const Index elements = elements_of(outcome.problem);
    if (outcome.status == Outcome::Status::failed && (least == nullptr || elements < size)) {
      least = &outcome;
      size = elements;
    }
  }
  HAE_EXPECTS(least != nullptr);
  return *least;
}

Outcome run_case(const hae_kernels& kernels, const Case& one, const Problem& problem) {
  Outcome outcome = run(kernels, problem);
  outcome.name = one.name;
  outcome.features = features(problem);
  if (outcome.status != Outcome::Status::failed) {
    outcome.problem = {};
    outcome.results = {};
  }
  return outcome;
}

}  // namespace

std::vector<std::string> case_names(const Operation& operation) {
  std::vector<std::string> names;
  for (const Case& one : operation.cases()) {
    names.push_back(one.name);
  }
  return names;
}

Problem problem_of(const Operation& operation, const std::string& name, std::uint64_t seed) {
  const OwnArithmetic own;
  for (const Case& one : operation.cases()) {
    if (one.name == name) {
      Draw draw(name, seed);
      return one.make(draw);
    }
  }
  throw ConfigError("case '" + name + "' is unknown; hae validate --list prints the cases");
}

std::vector<OperationReport> validate(const hae_kernels& kernels, const Options& options) {
  const OwnArithmetic own;
  check(kernels);
  for (const std::string& name : options.operations) {
    static_cast<void>(operation_of(name));
  }
  const std::string wanted = options.one_case.substr(0, options.one_case.find('/'));
  if (!options.one_case.empty() && !options.operations.empty() &&
      std::ranges::count(options.operations, wanted) == 0) {
    throw ConfigError("case '" + options.one_case + "' is of operation " + wanted +
                      ", which is not asked for; leave --operation away");
  }
  if (!options.one_case.empty()) {
    static_cast<void>(problem_of(operation_of(wanted), options.one_case, options.seed));
  }
  std::vector<OperationReport> reports;
  for (const Operation* operation : operations()) {
    const bool is_chosen =
        options.operations.empty() || std::ranges::count(options.operations, operation->name) > 0;
    if (!is_chosen || (!options.one_case.empty() && wanted != operation->name)) {
      continue;
    }
    OperationReport report{operation->name, operation->offered(kernels)};
    std::vector<Case> cases = report.offered ? operation->cases() : std::vector<Case>{};
    std::erase_if(cases,
                  [&](const Case& one) { return !options.one_case.empty() && one.name != options.one_case; });
    for (const Case& one : cases) {
      if (options.progress) {
        options.progress(one.name, double(report.outcomes.size()) / double(cases.size()));
      }
      Draw draw(one.name, options.seed);
      const Problem problem = asking_for(options.outputs, one.make(draw));
      if (problem.outputs.empty()) {
        continue;
      }
      if (elements_of(problem) > options.most_elements) {
        continue;
      }
      Outcome outcome = run_case(kernels, one, problem);
      report.passed += outcome.status == Outcome::Status::passed;
      report.unsupported += outcome.status == Outcome::Status::unsupported;
      report.left_out += outcome.status == Outcome::Status::left_out;
      report.failed += outcome.status == Outcome::Status::failed;
      report.outcomes.push_back(std::move(outcome));
    }
    if (report.failed > 0) {
      report.fault = diagnose(kernels, report.outcomes);
      report.smallest = shrink(kernels, least_failing(report.outcomes));
    }
    reports.push_back(std::move(report));
  }
  return reports;
}

}  // namespace hae::validate
