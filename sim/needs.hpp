#pragma once

#include <string>

#include "sim/policy.hpp"
#include "sim/trace.hpp"

namespace hae {

/// Refuses a sequence that lacks what a policy needs, before anything runs.
///
/// prompt_rows  whether the replay reads prompt rows at all; a policy that needs some must not be given one
///              that does not
/// where        begins the message, e.g. `trace.h5: sequence 'board 3'`
/// throws       NeedsError that names what is missing, the policy and the layer
void check_needs(const SequenceInfo& info, const Policy& policy, bool prompt_rows, const std::string& where);

}  // namespace hae
