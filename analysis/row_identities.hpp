#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "analysis/claims/renormalisation.hpp"
#include "analysis/decode_walk.hpp"

namespace hae::analysis {

/// The claims about single rows, ROW.*, and where each came nearest to failing.
inline constexpr std::array<std::string_view, 5> kRowClaims = {"ROW.variation", "ROW.kl", "ROW.output",
                                                               "ROW.diameter", "ROW.one-token"};
using RowFindings = std::array<Finding, kRowClaims.size()>;

/// Decode steps of a layer that are looked at, evenly spaced from the first to the last: enough to meet every
/// kind of row, few enough not to take longer than a replay.
inline constexpr Index kMostRowSteps = 64;

/// Evaluates ROW.* on decode rows of every query head. Output identities do not apply without V.
class RowIdentitiesVisitor final : public DecodeVisitor {
 public:
  explicit RowIdentitiesVisitor(const SequenceInfo& info);

  void row(const DecodeRow& row) override;

  /// Of all layers, when the walk is over.
  [[nodiscard]] RowFindings take() const;

 private:
  struct Layer {
    std::vector<double> diameters;  ///< [kv_heads] of all values, found at the first row
    RowFindings findings;
    bool seen = false;
  };

  const SequenceInfo& info_;
  std::vector<Layer> layers_;
};

/// The worse of each.
void add(RowFindings& worst, const RowFindings& other);

}  // namespace hae::analysis
