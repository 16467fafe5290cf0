#pragma once

#include <span>
#include <string_view>

namespace hae::analysis {

/// How far a claim is settled.
enum class Status {
  proved,   ///< machine-checked (Claim::proofs)
  cited,    ///< a theorem of somebody else, named in the document
  checked,  ///< tested, not proved
  refuted,  ///< false as stated: the document has a counterexample, and a test pins it
};
std::string_view name(Status status);

/// One claim about eviction: what is said, of what, and how far that is settled.
struct Claim {
  std::string_view id;         ///< short and stable, e.g. `G1.mass`
  std::string_view title;      ///< a few words
  std::string_view statement;  ///< the formula as plain text
  Status status = Status::checked;
  std::span<const std::string_view> assumptions;  ///< one sentence each
  std::span<const std::string_view> proofs;       ///< theorems in analysis/proofs, or empty
  std::string_view document;                      ///< proof or refutation in prose, a path from the root
};

/// All claims: what the paper prints, the repaired theorem, pruning, the comparison with greedy, the
/// identities behind the metrics. analysis/README.md is the same table for readers.
std::span<const Claim> claims();

/// The claim with this id.
///
/// throws  ContractViolation if there is none
const Claim& claim(std::string_view id);

}  // namespace hae::analysis
