#pragma once

#include "sim/policy.hpp"

namespace hae::reference {

/// Decode state of a policy that evicts nothing while decoding.
class KeepEverything final : public LayerDecode {
 public:
  Decision step(const Rows& /*row*/, const LayerCache& /*cache*/) override { return {}; }
};

}  // namespace hae::reference
