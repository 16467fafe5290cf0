#include <algorithm>
#include <cmath>
#include <utility>

#include "validate/validate.hpp"

namespace hae::validate {
namespace {

/// Faults found by comparing calls are one family: which of them shows depends on the calls before.
bool is_same_fault(const Finding& a, const Finding& b) {
  const auto family = [](Finding::Kind kind) {
    return kind == Finding::Kind::history ? Finding::Kind::unstable : kind;
  };
  return family(a.kind) == family(b.kind) && a.array == b.array;
}

/// A run of more elements counts as several.
constexpr Index kElementsOfARun = 2000;

class Shrinker {
 public:
  Shrinker(const hae_kernels& kernels, Outcome failed, int most_runs)
      : kernels_(kernels),
        smallest_(std::move(failed)),
        target_(smallest_.findings.front()),
        left_(most_runs) {}

  Outcome result() {
    simplify_layout();
    drop_arrays();
    for (bool smaller = true; smaller && left_ > 0;) {
      smaller = false;
      for (const auto& [axis, extent] : std::map(smallest_.problem.extents)) {
        smaller = shorten(axis) || smaller;
      }
    }
    simplify_layout();
    simplify_values();
    return std::move(smallest_);
  }

 private:
  /// Takes the candidate when it fails in the same way.
  bool take(const Problem& candidate) {
    if (left_ <= 0) {
      return false;
    }
    Index elements = 0;
    for (const Tensor& tensor : candidate.inputs) {
      elements += std::ssize(tensor.values);
    }
    left_ -= 1 + elements / kElementsOfARun;
    Outcome outcome = run(kernels_, candidate);
    const auto same = std::ranges::find_if(
        outcome.findings, [&](const Finding& finding) { return is_same_fault(finding, target_); });
    if (same == outcome.findings.end()) {
      return false;
    }
    std::iter_swap(same, outcome.findings.begin());
    outcome.name = smallest_.name;
    smallest_ = std::move(outcome);
    return true;
  }

  void simplify_layout() {
    const auto with = [&](auto change) {
      Problem candidate = smallest_.problem;
      if (change(candidate.layout)) {
        take(candidate);
      }
    };
    with([](Layout& layout) { return std::exchange(layout.page_size, 0) != 0; });
    with([](Layout& layout) { return std::exchange(layout.in_place, false); });
    with([](Layout& layout) {
      return std::exchange(layout.order, Layout::Order::dense) != Layout::Order::dense;
    });
    with([](Layout& layout) { return std::exchange(layout.misaligned, false); });
    with([](Layout& layout) { return std::exchange(layout.far, false); });
  }

  /// Optional arguments. An operation has at least one output, and its kernel says what it cannot be without.
  void drop_arrays() {
    for (const Tensor& output : std::vector(smallest_.problem.outputs)) {
      if (output.name == target_.array || is_essential(output.name)) {
        continue;
      }
      Problem candidate = smallest_.problem;
      std::erase_if(candidate.outputs, [&](const Tensor& other) { return other.name == output.name; });
      const std::string from = output.name.substr(0, output.name.rfind("_out"));
      std::erase_if(candidate.inputs, [&](const Tensor& other) {
        return other.name == output.name || (from != output.name && other.name == from);
      });
      if (!candidate.outputs.empty()) {
        take(candidate);
      }
    }
    for (const std::string name : {"lengths", "counted", "visible", "eligible", "positions"}) {
      if (name == "lengths" && smallest_.problem.layout.page_size > 0) {
        continue;  // a block table says how many pages there are, not how many slots
      }
      const bool is_moved = smallest_.problem.output(name + "_out") != nullptr;
      if (smallest_.problem.input(name) != nullptr && !is_moved) {
        take(*without_input(smallest_.problem, name));
      }
    }
  }

  /// Leaves out indices, halves first, then smaller runs. Whether anything went.
  bool shorten(Axis axis) {
    // Nothing to attend to is a case of its own; no heads or no dimensions is none.
    const bool may_be_empty = axis == Axis::slots || axis == Axis::rows || axis == Axis::most;
    const Index least = may_be_empty ? 0 : 1;
    bool smaller = false;
    for (Index run = smallest_.problem.extent(axis); run > 0; run /= 2) {
      for (Index begin = 0; begin + run <= smallest_.problem.extent(axis);) {
        if (smallest_.problem.extent(axis) - run < least) {
          break;
        }
        const bool gone = take(without(smallest_.problem, axis, begin, begin + run));
        smaller = smaller || gone;
        begin += gone ? 0 : run;
        if (left_ <= 0) {
          return smaller;
        }
      }
    }
    return smaller;
  }

  void simplify_values() {
    for (std::size_t input = 0; input < smallest_.problem.inputs.size(); ++input) {
      const bool is_real = is_float(smallest_.problem.inputs[input].type);
      simplify(
          input, [](double) { return 1.0; }, !is_real);
      simplify(
          input, [](double) { return 0.0; }, !is_real);
      if (is_real) {
        simplify(
            input, [](double value) { return std::isfinite(value) ? std::nearbyint(value) : value; }, false);
        simplify(
            input, [](double value) { return std::isfinite(value) ? std::nearbyint(4 * value) / 4 : value; },
            false);
      }
    }
    for (const auto& [name, number] : std::map(smallest_.problem.numbers)) {
      if (name == "scale" && number != 1) {
        Problem candidate = smallest_.problem;
        candidate.numbers[name] = 1;
        take(candidate);
      }
    }
  }

  /// Replaces all values of an input, or as many as go, halves first. Flags, counts and positions keep
  /// theirs: theirs are what they count.
  template <typename Change>
  void simplify(std::size_t input, const Change& change, bool keep) {
    if (keep) {
      return;
    }
    const auto size = std::ssize(smallest_.problem.inputs[input].values);
    for (Index run = size; run > 0; run /= 2) {
      for (Index begin = 0; begin < size; begin += run) {
        Problem candidate = smallest_.problem;
        bool changed = false;
        for (Index i = begin; i < std::min(begin + run, size); ++i) {
          double& value = candidate.inputs[input].values[at(i)];
          const double simpler = rounded(candidate.inputs[input].type, change(value));
          // 0 is simpler than 1, and both than anything else.
          const bool is_simple = value == 0 || (value == 1 && simpler != 0);
          if (!is_simple && simpler != value && !(std::isnan(simpler) && std::isnan(value))) {
            value = simpler;
            changed = true;
          }
        }
        if (changed) {
          take(candidate);
        }
        if (left_ <= 0) {
          return;
        }
      }
    }
  }

  const hae_kernels& kernels_;
  Outcome smallest_;
  const Finding target_;
  Index left_;
};

}  // namespace

Outcome shrink(const hae_kernels& kernels, const Outcome& failed, int most_runs) {
  const OwnArithmetic own;
  return Shrinker(kernels, failed, most_runs).result();
}

}  // namespace hae::validate
