#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "analysis/foregone_attention.hpp"
#include "sim/cli/companions.hpp"
#include "sim/cli/comparison.hpp"

namespace hae::cli {

/// Findings by the id of their claim (analysis::claims).
using Findings = std::map<std::string_view, analysis::Finding>;

/// Of each claim the worse finding.
void add(Findings& worst, const Findings& other);

/// A policy and the companions that its claims are about.
struct Certified {
  PolicySource policy;
  std::optional<Pruning> pruning;
  std::optional<BinAgainstGreedy> pair;
};

/// What pruning lost of the attention that prompt text pays to pictures, in the deciding layer that lost
/// most.
struct PruningLoss {
  double share = 0;      ///< Σ_C A_j / A_V
  Index pruned = 0;      ///< |C|
  Index candidates = 0;  ///< |V|
};

/// What one sequence shows under a policy: all that claims are evaluated on, and the findings that need no
/// other sequence.
struct Evidence {
  Index sequence_index = 0;
  std::string name;
  std::string group;
  std::optional<double> loss;                         ///< mean missed mass of its decode rows
  std::vector<analysis::ForegoneAttention> foregone;  ///< [layers]
  std::optional<PruningLoss> pruning;
  Index largest_bin = 0;  ///< D, the largest of any lane; 0 without a bin
  Findings findings;      ///< all claims but those about decay
  std::optional<analysis::Finding>
      observed;  ///< G1.mass with the policy's own scores, where they are not full
};

/// Replays one sequence through the policy and its companions and evaluates the claims.
///
/// epsilon  of DAP.share
/// throws   ConfigError if the policy merges, or an option turns out impossible; TraceError for a bad trace
Evidence gather_evidence(const SequenceSource& source, const Certified& certified, double epsilon,
                         const ReplayOptions& options);

}  // namespace hae::cli
