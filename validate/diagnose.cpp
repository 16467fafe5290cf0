#include <algorithm>
#include <cmath>

#include "validate/validate.hpp"

namespace hae::validate {
namespace {

/// So many failing cases are held against the faults of the field, the smallest first.
constexpr std::size_t kMostCases = 24;

/// A fault is named when it explains at least this share of them.
constexpr double kShare = 0.6;

Index size_of(const Outcome& outcome) {
  Index size = 0;
  for (const Tensor& tensor : outcome.problem.inputs) {
    size += std::ssize(tensor.values);
  }
  return size;
}

/// The failing cases to look at.
std::vector<const Outcome*> evidence(const std::vector<Outcome>& outcomes) {
  std::vector<const Outcome*> failed;
  for (const Outcome& outcome : outcomes) {
    if (outcome.status == Outcome::Status::failed) {
      failed.push_back(&outcome);
    }
  }
  std::ranges::stable_sort(failed, {}, [](const Outcome* outcome) { return size_of(*outcome); });
  failed.resize(std::min(failed.size(), kMostCases));
  return failed;
}

bool has(const Outcome& outcome, Finding::Kind kind) {
  return std::ranges::any_of(outcome.findings, [&](const Finding& finding) { return finding.kind == kind; });
}

Index count(const std::vector<const Outcome*>& failed, const std::function<bool(const Outcome&)>& holds) {
  return std::ranges::count_if(failed, [&](const Outcome* outcome) { return holds(*outcome); });
}

bool agrees(const Operation& operation, const Problem& problem, const Results& results,
            const Arithmetic& arithmetic) {
  return std::ranges::all_of(problem.outputs,
                             [&](const Tensor& output) { return results.contains(output.name); }) &&
         operation.judge(problem, results, arithmetic).empty();
}

bool explains(const Suspicion& suspicion, const Operation& operation, const Outcome& outcome,
              const Arithmetic& arithmetic) {
  if (outcome.results.empty()) {
    return false;  // the kernel returned an error
  }
  if (suspicion.explains) {
    return suspicion.explains(outcome.problem, outcome.findings);
  }
  const std::optional<Problem> altered = suspicion.alter(outcome.problem);
  return altered && agrees(operation, *altered, outcome.results, arithmetic);
}

std::string in_cases(Index explained, std::size_t all) {
  return " (explains " + std::to_string(explained) + " of " + std::to_string(all) + " failing cases)";
}

/// Faults that show in comparing calls, not in values.
std::string by_kind(const std::vector<const Outcome*>& failed) {
  const auto any = [&](Finding::Kind kind) {
    return count(failed, [&](const Outcome& outcome) { return has(outcome, kind); }) > 0;
  };
  if (any(Finding::Kind::unstable)) {
    return "equal calls differ: a race, or sums whose order changes from call to call";
  }
  if (any(Finding::Kind::history)) {
    return "a result depends on earlier calls: work space or state that is not cleared";
  }
  if (any(Finding::Kind::residue)) {
    return "a result depends on what its output held before: it is added to, or partly written";
  }
  return "";
}

std::string by_suspicion(const Operation& operation, const std::vector<const Outcome*>& failed,
                         const Arithmetic& arithmetic) {
  std::string best;
  Index most = 0;
  for (const Suspicion& suspicion : operation.suspicions()) {
    const Index explained = count(
        failed, [&](const Outcome& outcome) { return explains(suspicion, operation, outcome, arithmetic); });
    if (explained > most && double(explained) >= kShare * double(failed.size())) {
      most = explained;
      best = suspicion.fault + in_cases(explained, failed.size());
    }
  }
  return best;
}

/// Whether the results are right for sums of fewer bits than the table states.
std::string by_precision(const Operation& operation, const std::vector<const Outcome*>& failed) {
  struct Narrower {
    Format format;
    const char* name;
  };
  constexpr Narrower kFormats[] = {
      {{24, 8}, "float32"}, {{11, 8}, "TensorFloat-32 or float16"}, {{8, 8}, "bfloat16"}};
  for (const auto& [format, name] : kFormats) {
    const Index explained = count(failed, [&, format = format](const Outcome& outcome) {
      return !outcome.results.empty() && !has(outcome, Finding::Kind::overrun) &&
             agrees(operation, outcome.problem, outcome.results, Arithmetic(format));
    });
    if (double(explained) >= kShare * double(failed.size())) {
      return std::string("sums or products have fewer bits than stated: ") + name +
             in_cases(explained, failed.size());
    }
  }
  return "";
}

std::string by_damage(const std::vector<const Outcome*>& failed) {
  for (const Outcome* outcome : failed) {
    for (const Finding& finding : outcome->findings) {
      if (finding.kind == Finding::Kind::overrun) {
        const bool is_input = finding.text.find("an input") != std::string::npos;
        const bool is_gap = finding.text.find("between") != std::string::npos;
        return is_input ? "an input is changed"
               : is_gap ? "strides are ignored: memory between rows is written"
                        : "memory outside an array is written";
      }
    }
  }
  return "";
}

/// What all failing cases have and no passing one.
std::string in_common(const std::vector<Outcome>& outcomes, const std::vector<const Outcome*>& failed) {
  std::set<std::string> common = failed.front()->features;
  for (const Outcome& outcome : outcomes) {
    const bool is_failed = outcome.status == Outcome::Status::failed;
    if (outcome.status != Outcome::Status::unsupported) {
      std::erase_if(common, [&](const std::string& feature) {
        return outcome.features.contains(feature) != is_failed;
      });
    }
  }
  std::string text;
  for (const std::string& feature : common) {
    text += (text.empty() ? "" : ", ") + feature;
  }
  return text;
}

}  // namespace

std::string diagnose(const hae_kernels& kernels, const std::vector<Outcome>& outcomes) {
  const std::vector<const Outcome*> failed = evidence(outcomes);
  if (failed.empty()) {
    return "";
  }
  const Operation& operation = operation_of(failed.front()->problem.operation);
  const Arithmetic arithmetic(format_of(static_cast<Type>(kernels.accumulation)));
  std::string fault = by_kind(failed);
  if (fault.empty()) {
    fault = by_suspicion(operation, failed, arithmetic);
  }
  if (fault.empty()) {
    fault = by_damage(failed);
  }
  if (fault.empty()) {
    fault = by_precision(operation, failed);
  }
  const bool unwritten = count(failed, [](const Outcome& o) { return has(o, Finding::Kind::unwritten); }) > 0;
  if (fault.empty() && unwritten) {
    fault = "elements of an output are not written";
  }
  const std::string common = in_common(outcomes, failed);
  if (fault.empty()) {
    fault = "no fault that is known here explains it";
  }
  return common.empty() ? fault : fault + "; only cases with " + common + " fail";
}

}  // namespace hae::validate
