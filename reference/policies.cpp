#include "reference/policies.hpp"

#include <array>
#include <string>

namespace hae::reference {

std::span<const PolicyInfo> policies() {
  static const std::array table = {
      kHae,
      kGreedy,
      kH2oLayerwise,
      kH2oFlexgen,
      kH2oPrefillWindow,
      kH2oObservedMean,
      kH2oHistory,
      kH2oOvBlock,
      kScissorhands,
      kTova,
      kStreaming,
      kSnapkv,
      kSnapkvKvpress,
      kPyramidkv,
      kAdakv,
      kNacl,
      kKnorm,
      kKeydiff,
      kExpectedAttention,
      kFastV,
      kFastVTextMean,
      kSparseVlm,
      kMustDrop,
      kLookm,
      kTomeDecoder,
      kWindow,
      kRandom,
      kFull,
  };
  return table;
}

std::shared_ptr<const Policy> make_policy(std::string_view spec) {
  const std::string_view name = Options::name_of(spec);
  std::string known;
  for (const PolicyInfo& info : policies()) {
    if (info.name == name) {
      return info.make(Options(spec, info.options));
    }
    known += (known.empty() ? "" : ", ") + std::string(info.name);
  }
  throw ConfigError("unknown policy '" + std::string(name) + "'; expected one of " + known);
}

}  // namespace hae::reference
