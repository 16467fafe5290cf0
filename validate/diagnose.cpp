#include <algorithm>
#include <cmath>

#include "validate/validate.hpp"

namespace hae::validate {
namespace {

/// So many failing cases are held against the faults of the field, small and larger ones.
constexpr std::size_t kMostCases = 24;
constexpr Index kMostElements = 20000;

/// A fault is named when it explains at least this share of them.
constexpr double kShare = 0.7;

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
  const auto small = std::ranges::count_if(
      failed, [](const Outcome* outcome) { return size_of(*outcome) <= kMostElements; });
  failed.resize(std::max<std::size_t>(at(small), std::min<std::size_t>(failed.size(), 1)));
  std::vector<const Outcome*> spread;
  const std::size_t cases = std::min(failed.size(), kMostCases);
  for (std::size_t i = 0; i < cases; ++i) {
    spread.push_back(failed[i * failed.size() / cases]);
  }
  return spread;
}

bool has(const Outcome& outcome, Finding::Kind kind) {
  return std::ranges::any_of(outcome.findings, [&](const Finding& finding) { return finding.kind == kind; });
}

Index count(const std::vector<const Outcome*>& failed, const std::function<bool(const Outcome&)>& holds) {
  return std::ranges::count_if(failed, [&](const Outcome* outcome) { return holds(*outcome); });
}

/// Scores beside a choice are the given ones, whatever a fault ranks by.
bool agrees(const Operation& operation, Problem problem, Results results, const Arithmetic& arithmetic) {
  std::erase_if(problem.outputs, [](const Tensor& output) { return output.name == "chosen_scores"; });
  results.erase("chosen_scores");
  return operation.judge(problem, results, arithmetic).empty();
}

bool explains(const Suspicion& suspicion, const Operation& operation, const Outcome& outcome,
              const Arithmetic& arithmetic) {
  if (outcome.results.empty()) {
    return false;  // the kernel returned an error
  }
  if (suspicion.explains) {
    return suspicion.explains(outcome.problem, outcome.results, outcome.findings);
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
    return "equal calls differ: a race, sums whose order changes, or a buffer with what an earlier call left "
           "in it";
  }
  if (any(Finding::Kind::streams)) {
    return "calls in two streams disturb each other: work space or state that is not the call's own";
  }
  const Index by_history = count(failed, [](const Outcome& outcome) {
    return std::ranges::all_of(outcome.findings,
                               [](const Finding& finding) { return finding.kind == Finding::Kind::history; });
  });
  if (2 * by_history > std::ssize(failed)) {
    return "a result depends on earlier calls: state that is kept from one to the next (" +
           failed.front()->findings.front().text + ")";
  }
  for (const Outcome* outcome : failed) {
    if (has(*outcome, Finding::Kind::status)) {
      return outcome->findings.front().text;
    }
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
std::string by_precision(const Operation& operation, const std::vector<const Outcome*>& failed,
                         const Format& stated) {
  struct Narrower {
    Format format;
    const char* name;
  };
  constexpr Narrower kFormats[] = {
      {{24, 8}, "float32"}, {{11, 8}, "TensorFloat-32 or float16"}, {{8, 8}, "bfloat16"}};
  for (const auto& [format, name] : kFormats) {
    const Index explained = count(failed, [&, format = format](const Outcome& outcome) {
      const bool is_finite = std::ranges::all_of(outcome.findings, [](const Finding& finding) {
        // Roundings are small beside the number; a token left out is not.
        return finding.kind != Finding::Kind::unwritten && std::isfinite(finding.got) &&
               std::fabs(finding.got - finding.expected) <= std::fabs(finding.expected) / 8;
      });
      return !outcome.results.empty() && is_finite && format.precision < stated.precision &&
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

std::string listed(const std::set<std::string>& features) {
  std::string text;
  for (const std::string& feature : features) {
    text += (text.empty() ? "" : ", ") + feature;
  }
  return text;
}

/// What all failing cases have: and no passing one, or else at most half of them.
std::string in_common(const std::vector<Outcome>& outcomes) {
  std::map<std::string, Index> failed;
  std::map<std::string, Index> passed;
  Index failures = 0;
  Index passes = 0;
  for (const Outcome& outcome : outcomes) {
    const bool is_failed = outcome.status == Outcome::Status::failed;
    failures += is_failed;
    passes += outcome.status == Outcome::Status::passed;
    for (const std::string& feature : outcome.features) {
      ++(is_failed ? failed : passed)[feature];
    }
  }
  std::set<std::string> only;
  std::set<std::string> mostly;
  for (const auto& [feature, times] : failed) {
    if (times == failures && passes > 0) {
      (passed[feature] == 0 ? only : mostly).insert(feature);
    }
  }
  std::erase_if(mostly, [&](const std::string& feature) { return 2 * passed[feature] > passes; });
  return !only.empty()     ? "; only cases with " + listed(only) + " fail"
         : !mostly.empty() ? "; all failing cases have " + listed(mostly)
                           : "";
}

}  // namespace

std::string diagnose(const hae_kernels& kernels, const std::vector<Outcome>& outcomes) {
  const OwnArithmetic own;
  const std::vector<const Outcome*> failed = evidence(outcomes);
  if (failed.empty()) {
    return "";
  }
  const Operation& operation = operation_of(failed.front()->problem.operation);
  const Format stated = format_of(static_cast<Type>(kernels.accumulation));
  const Arithmetic arithmetic(stated);
  const Index far = count(failed, [](const Outcome& outcome) { return outcome.problem.layout.far; });
  std::string fault = far == std::ssize(failed) ? "offsets are computed in 32 bits" : by_kind(failed);
  if (fault.empty()) {
    fault = by_damage(failed);
  }
  if (fault.empty()) {
    fault = by_suspicion(operation, failed, arithmetic);
  }
  const auto any = [&](Finding::Kind kind) {
    return count(failed, [&](const Outcome& outcome) { return has(outcome, kind); }) > 0;
  };
  if (fault.empty() && any(Finding::Kind::residue)) {
    fault =
        "a result depends on what its output or the work space held before: it is not cleared, or partly "
        "written";
  }
  if (fault.empty() && any(Finding::Kind::unwritten)) {
    fault = "elements of an output are not written";
    if (kernels.memory.allocate != nullptr) {
      fault += ", or not in the stream of the call";
    }
  }
  if (fault.empty()) {
    fault = by_precision(operation, failed, stated);
  }
  if (fault.empty()) {
    fault = "no fault that is known here explains it";
  }
  return fault + in_common(outcomes);
}

}  // namespace hae::validate
