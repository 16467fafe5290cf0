#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <stdexcept>

#include "sim/errors.hpp"
#include "validate/validate.hpp"

namespace hae::validate {
namespace {

/// Two fillings of outputs and work space: NaN or -1, and a small number, 0.011 in float32.
constexpr unsigned char kPoisons[] = {0xFF, 0x3C};

/// In place of a status: the kernel threw, and it was told.
constexpr std::int32_t kThrew = std::numeric_limits<std::int32_t>::min();

/// The same shape with other numbers: floats reversed and halved, all slots in use, lists as long as can be.
Problem disturbed(const Problem& problem) {
  Problem other = problem;
  for (Tensor& given : other.inputs) {
    if (is_float(given.type)) {
      std::ranges::reverse(given.values);
      for (double& value : given.values) {
        value = rounded(given.type, std::isnan(value) ? 1.0 : value / 2 + 0.125);
      }
    }
    if (given.counts) {
      std::ranges::fill(given.values, double(problem.extent(*given.counts)));
    }
  }
  return other;
}

/// Work space between guards; keeps what a call left in it.
class Workspace {
 public:
  explicit Workspace(const Memory& memory) : memory_(memory) {}

  /// fill  none: as the last call left it
  hae_context context(std::int64_t bytes, std::optional<unsigned char> fill, Memory::Stream stream) {
    hae_context context = memory_.context(stream);
    if (bytes <= 0) {
      return context;
    }
    if (bytes != bytes_) {
      bytes_ = bytes;
      block_ = memory_.allocate(bytes_ + kGuard);
      fill = fill.value_or(kPoisons[0]);
    }
    if (fill) {
      std::vector<std::byte> poison(at(bytes_ + kGuard), std::byte{0xFF});
      std::fill_n(poison.begin(), bytes_, std::byte{*fill});
      memory_.copy_in(block_.get(), poison.data(), std::ssize(poison));
    }
    context.workspace = block_.get();
    context.workspace_bytes = bytes_;
    return context;
  }

  [[nodiscard]] bool overrun() const {
    if (block_ == nullptr) {
      return false;
    }
    std::vector<std::byte> all(at(bytes_ + kGuard));
    memory_.copy_out(all.data(), block_.get(), std::ssize(all));
    return std::any_of(all.begin() + bytes_, all.end(), [](std::byte b) { return b != std::byte{0xFF}; });
  }

 private:
  static constexpr Index kGuard = 512;

  const Memory& memory_;
  std::int64_t bytes_ = 0;
  std::shared_ptr<void> block_;
};

Finding finding_of(Finding::Kind kind, const std::string& array, std::string text) {
  Finding finding;
  finding.kind = kind;
  finding.array = array;
  finding.text = array + (array.empty() ? "" : ": ") + std::move(text);
  return finding;
}

/// The elements of each output, without what lies between them.
using Bytes = std::map<std::string, std::vector<std::byte>>;

/// One problem, its arrays, and calls on them.
class Session {
 public:
  Session(const hae_kernels& kernels, const Problem& problem)
      : kernels_(kernels),
        operation_(operation_of(problem.operation)),
        problem_(problem),
        memory_(kernels.memory),
        arithmetic_(format_of(static_cast<Type>(kernels.accumulation))),
        placed_(problem, memory_),
        workspace_(memory_) {}

  Outcome run() {
    Outcome outcome;
    outcome.problem = problem_;
    const std::int32_t status = call(placed_, kPoisons[0], kPoisons[0]);
    if (status == HAE_UNSUPPORTED) {
      outcome.status = Outcome::Status::unsupported;
      return outcome;
    }
    if (status == HAE_DONE) {
      outcome.results = results();
      const Bytes first = bytes();
      call(placed_, kPoisons[0], kPoisons[0]);
      compare_bytes(first, Finding::Kind::unstable, "an equal call gave other bytes");
      call(placed_, kPoisons[1], kPoisons[1]);
      find_unwritten(first);
      judge(outcome.results);
      compare_bytes(first, Finding::Kind::residue,
                    "depends on what outputs or work space held before the call");
      overlap(first);
      disturb(outcome);
      call(placed_, kPoisons[0], std::nullopt);
      compare_bytes(first, Finding::Kind::history, "a call after one with other numbers gave other bytes");
    }
    outcome.findings = std::move(findings_);
    outcome.status = outcome.findings.empty() ? Outcome::Status::passed : Outcome::Status::failed;
    return outcome;
  }

 private:
  std::int32_t call(Placement& placed, unsigned char poison, std::optional<unsigned char> workspace) {
    placed.fill(poison);
    const std::int32_t status = launch(placed, workspace_, workspace, Memory::Stream::own);
    memory_.synchronize(Memory::Stream::own);
    placed.fetch();
    if (status != HAE_DONE && status != HAE_UNSUPPORTED && status != kThrew) {
      add(finding_of(
          Finding::Kind::status, "",
          "the kernel returned " + std::to_string(status) + ", expected HAE_DONE or HAE_UNSUPPORTED"));
    }
    for (const auto& [array, what] : placed.damage()) {
      add(finding_of(Finding::Kind::overrun, array, what));
    }
    if (workspace_.overrun()) {
      add(finding_of(Finding::Kind::overrun, "workspace", "written beyond workspace_bytes"));
    }
    return status;
  }

  std::int32_t launch(const Placement& placed, Workspace& workspace, std::optional<unsigned char> fill,
                      Memory::Stream stream) {
    try {
      return operation_.call(kernels_, problem_, placed, [&](std::int64_t bytes) {
        constexpr std::int64_t kMost = std::int64_t{1} << 50;
        if (bytes < 0 || bytes > kMost) {
          throw std::length_error("workspace_bytes gave " + std::to_string(bytes) + ", expected 0 .. 2^50");
        }
        return workspace.context(bytes, fill, stream);
      });
    } catch (const DeviceError&) {
      throw;  // no memory: the machine's fault
    } catch (const std::exception& error) {
      add(finding_of(Finding::Kind::status, "", std::string("it threw: ") + error.what()));
    } catch (...) {
      add(finding_of(Finding::Kind::status, "", "it threw something that is no std::exception"));
    }
    return kThrew;
  }

  /// Two calls at once, each with its own arrays and work space, in two streams, in either order: this one
  /// gives what it gave alone.
  void overlap(const Bytes& first) {
    if (!memory_.has_other_stream() || !findings_.empty()) {
      return;
    }
    Placement other(disturbed(problem_), memory_);
    Workspace others(memory_);
    for (const bool is_second : {false, true}) {
      placed_.fill(kPoisons[0]);
      other.fill(kPoisons[1]);
      const auto launch_other = [&](Memory::Stream stream) { launch(other, others, kPoisons[1], stream); };
      if (is_second) {
        launch_other(Memory::Stream::own);
        launch(placed_, workspace_, kPoisons[0], Memory::Stream::other);
      } else {
        launch(placed_, workspace_, kPoisons[0], Memory::Stream::own);
        launch_other(Memory::Stream::other);
      }
      memory_.synchronize(Memory::Stream::own);
      memory_.synchronize(Memory::Stream::other);
      placed_.fetch();
      compare_bytes(first, Finding::Kind::streams, "gave other bytes beside a call in another stream");
    }
  }

  /// Each array is reported once for each kind of fault.
  void add(Finding finding) {
    const bool known = std::ranges::any_of(findings_, [&](const Finding& other) {
      return other.kind == finding.kind && other.array == finding.array;
    });
    if (!known) {
      findings_.push_back(std::move(finding));
    }
  }

  [[nodiscard]] Results results() const {
    Results results;
    for (const Tensor& output : problem_.outputs) {
      results[output.name] = placed_.output(output.name).values();
    }
    return results;
  }

  [[nodiscard]] Bytes bytes() const {
    Bytes all;
    for (const Tensor& output : problem_.outputs) {
      all[output.name].reserve(at(problem_.size(output) * bytes_of(output.type)));
      const Index size = bytes_of(output.type);
      for (Index i = 0; i < problem_.size(output); ++i) {
        const std::byte* element = placed_.output(output.name).element(i);
        all[output.name].insert(all[output.name].end(), element, element + size);
      }
    }
    return all;
  }

  void judge(const Results& results) {
    for (Finding& finding : operation_.judge(problem_, results, arithmetic_)) {
      const bool is_unwritten = std::ranges::any_of(findings_, [&](const Finding& other) {
        return other.kind == Finding::Kind::unwritten && other.array == finding.array;
      });
      if (!is_unwritten) {
        add(std::move(finding));
      }
    }
  }

  /// Elements that hold the filling after either call.
  void find_unwritten(const Bytes& first) {
    const Bytes second = bytes();
    for (const Tensor& output : problem_.outputs) {
      if (problem_.input(output.name) != nullptr || problem_.layout.in_place || problem_.size(output) == 0) {
        continue;
      }
      const std::vector<bool> defined = operation_.defined(problem_, output);
      const Index size = bytes_of(output.type);
      const auto is_poison = [&](const std::vector<std::byte>& bytes, Index i, unsigned char poison) {
        return std::all_of(bytes.begin() + i * size, bytes.begin() + (i + 1) * size,
                           [&](std::byte b) { return b == std::byte{poison}; });
      };
      for (Index i = 0; i < std::ssize(defined); ++i) {
        if (defined[at(i)] && is_poison(first.at(output.name), i, kPoisons[0]) &&
            is_poison(second.at(output.name), i, kPoisons[1])) {
          Finding finding = finding_of(Finding::Kind::unwritten, output.name,
                                       "element " + place_of(problem_, output, i) + " was not written");
          finding.place = place_of(problem_, output, i);
          add(std::move(finding));
          break;
        }
      }
    }
  }

  void compare_bytes(const Bytes& first, Finding::Kind kind, const std::string& what) {
    const Bytes now = bytes();
    for (const Tensor& output : problem_.outputs) {
      if (now.at(output.name) == first.at(output.name)) {
        continue;
      }
      const std::vector<bool> defined = operation_.defined(problem_, output);
      const Index size = bytes_of(output.type);
      for (Index i = 0; i < std::ssize(defined); ++i) {
        if (!defined[at(i)] || std::memcmp(first.at(output.name).data() + i * size,
                                           now.at(output.name).data() + i * size, at(size)) == 0) {
          continue;
        }
        const bool is_known = std::ranges::any_of(findings_, [&](const Finding& other) {
          return other.array == output.name &&
                 (other.kind == Finding::Kind::unstable || other.kind == Finding::Kind::residue ||
                  other.kind == Finding::Kind::unwritten);
        });
        if (!is_known) {
          Finding finding =
              finding_of(kind, output.name, "element " + place_of(problem_, output, i) + ": " + what);
          finding.place = place_of(problem_, output, i);
          add(std::move(finding));
        }
        break;
      }
    }
  }

  /// Calls with other numbers in the same shape; where all was right before, they are held to the reference
  /// too. What is wrong then is either an input of the calls before, or a counterexample of its own.
  void disturb(Outcome& outcome) {
    const Problem other = disturbed(problem_);
    placed_.give(other);  // at the same addresses: what is kept by address is kept too
    const std::int32_t status = call(placed_, kPoisons[1], std::nullopt);
    const Results results = this->results();
    placed_.give(problem_);
    if (status != HAE_DONE || !findings_.empty()) {
      return;
    }
    const std::vector<Finding> wrong = operation_.judge(other, results, arithmetic_);
    if (wrong.empty()) {
      return;
    }
    for (const Tensor& input : problem_.inputs) {
      Problem mixed = other;
      mixed.input(input.name)->values = input.values;
      if (operation_.judge(mixed, results, arithmetic_).empty()) {
        add(finding_of(Finding::Kind::history, input.name,
                       "as an earlier call in the same shape gave it is used again"));
        return;
      }
    }
    std::ranges::for_each(wrong, [&](const Finding& finding) { add(finding); });
    outcome.problem = other;
    outcome.results = results;
  }

  const hae_kernels& kernels_;
  const Operation& operation_;
  const Problem& problem_;
  Memory memory_;
  Arithmetic arithmetic_;
  Placement placed_;
  Workspace workspace_;
  std::vector<Finding> findings_;
};

}  // namespace

void check(const hae_kernels& kernels) {
  const auto refuse = [](const std::string& what) { throw ConfigError("the table of kernels: " + what); };
  if (kernels.abi != HAE_KERNELS_ABI) {
    refuse("abi is " + std::to_string(kernels.abi) + ", expected " + std::to_string(HAE_KERNELS_ABI) +
           "; compile the library with this version's hae/kernels.h");
  }
  if (kernels.accumulation != HAE_FLOAT32 && kernels.accumulation != HAE_FLOAT64) {
    refuse("accumulation is " + std::to_string(kernels.accumulation) +
           ", expected HAE_FLOAT32 or HAE_FLOAT64: sums of thousands of terms in less have no bound");
  }
  const hae_memory& memory = kernels.memory;
  const bool any = memory.allocate != nullptr || memory.release != nullptr || memory.copy_in != nullptr ||
                   memory.copy_out != nullptr;
  const bool all = memory.allocate != nullptr && memory.release != nullptr && memory.copy_in != nullptr &&
                   memory.copy_out != nullptr;
  if (any != all) {
    refuse("memory has some of allocate, release, copy_in and copy_out; give all, or none for host memory");
  }
}

Outcome run(const hae_kernels& kernels, const Problem& problem) {
  const OwnArithmetic own;
  try {
    return Session(kernels, problem).run();
  } catch (const NoMemory&) {
    if (!problem.layout.far) {
      throw;
    }
    Outcome outcome;
    outcome.status = Outcome::Status::left_out;
    return outcome;
  }
}

}  // namespace hae::validate
