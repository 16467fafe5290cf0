#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "reference/options.hpp"
#include "sim/policy.hpp"

namespace hae::reference {

/// One line of the policy table.
struct PolicyInfo {
  std::string_view name;
  std::string_view summary;
  std::string_view source;
  std::string_view
      fidelity;  ///< what is exact, what is a reading of an ambiguous text, online or prefill only
  std::span<const OptionInfo> options;
  std::shared_ptr<const Policy> (*make)(Options);
};

/// All policies, in the order `hae policies` shows them.
std::span<const PolicyInfo> policies();

/// The policy of a spec `name:key=value,key=value`.
///
/// throws  ConfigError that names the key and what is allowed
std::shared_ptr<const Policy> make_policy(std::string_view spec);

// One entry a policy, each beside its implementation.
extern const PolicyInfo kHae;
extern const PolicyInfo kGreedy;
extern const PolicyInfo kH2oLayerwise;
extern const PolicyInfo kH2oFlexgen;
extern const PolicyInfo kH2oPrefillWindow;
extern const PolicyInfo kH2oObservedMean;
extern const PolicyInfo kH2oHistory;
extern const PolicyInfo kH2oOvBlock;
extern const PolicyInfo kScissorhands;
extern const PolicyInfo kTova;
extern const PolicyInfo kStreaming;
extern const PolicyInfo kSnapkv;
extern const PolicyInfo kSnapkvKvpress;
extern const PolicyInfo kPyramidkv;
extern const PolicyInfo kAdakv;
extern const PolicyInfo kNacl;
extern const PolicyInfo kKnorm;
extern const PolicyInfo kKeydiff;
extern const PolicyInfo kExpectedAttention;
extern const PolicyInfo kFastV;
extern const PolicyInfo kFastVTextMean;
extern const PolicyInfo kSparseVlm;
extern const PolicyInfo kMustDrop;
extern const PolicyInfo kLookm;
extern const PolicyInfo kTomeDecoder;
extern const PolicyInfo kWindow;
extern const PolicyInfo kRandom;
extern const PolicyInfo kFull;

}  // namespace hae::reference
