#include "reference/keep_everything.hpp"
#include "reference/policies.hpp"

namespace hae::reference {
namespace {

class FullRun final : public Run {
 public:
  std::unique_ptr<LayerDecode> decode(Index /*layer*/) override { return std::make_unique<KeepEverything>(); }
  [[nodiscard]] Limits limits(Index /*layer*/, Index /*lane*/) const override { return {}; }
};

class Full final : public Policy {
 public:
  [[nodiscard]] std::string spec() const override { return "full"; }
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> options() const override { return {}; }
  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override { return {}; }
  [[nodiscard]] std::unique_ptr<Run> begin(const SequenceInfo& /*info*/) const override {
    return std::make_unique<FullRun>();
  }
};

std::shared_ptr<const Policy> make(Options /*options*/) {
  return std::make_shared<Full>();
}

}  // namespace

const PolicyInfo kFull = {"full", "evicts nothing", "a control", "Online. Needs no attention.", {}, make};

}  // namespace hae::reference
