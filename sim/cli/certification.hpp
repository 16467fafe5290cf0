#pragma once

#include <functional>
#include <string>
#include <vector>

#include "sim/cli/checks.hpp"
#include "sim/cli/comparison.hpp"
#include "sim/cli/result_json.hpp"

namespace hae::cli {

inline constexpr const char* kCertificateSchema = "hae.certify/1";

/// What a policy is to be certified for.
struct CertificateQuestion {
  double epsilon =
      0;  ///< the loss that may be: mean missed mass of a sequence; attention to come; share of A_V
  double delta = 0.1;  ///< how often a certificate about a new sequence may be wrong
};

/// A whole result of schema hae.certify/1 (docs/results-format.md): the measured loss, the conformal
/// certificate, every claim with its finding, the decay envelope, fitted and tested, and the largest
/// parameters that proved bounds allow.
///
/// manifest  null for sequences in memory
/// options   nan and threads
/// progress  as compare's
/// throws    ConfigError for a bad number or a policy that cannot be certified; TraceError for a bad trace
Json certification(const std::vector<SequenceSource>& sources, const PolicySource& policy,
                   const CertificateQuestion& question, const Json& manifest,
                   const ComparisonOptions& options, const std::function<void(double)>& progress);

/// Name of the check that measured loss stays within epsilon.
inline constexpr const char* kLossCheck = "measured loss within epsilon";

/// What a certificate promises, one check each: the loss, and every proved claim that applies.
std::vector<Check> certificate_checks(const Json& result);

}  // namespace hae::cli
