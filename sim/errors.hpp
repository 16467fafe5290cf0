#pragma once

#include <stdexcept>
#include <string>

namespace hae {

/// The caller broke a contract: a programmer's mistake, also thrown in release builds.
class ContractViolation : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// A trace file is missing, unfinished, not ours or inconsistent. The message names file, dataset and
/// element.
class TraceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The trace is sound but lacks what a policy needs. The message names both.
class NeedsError : public TraceError {
 public:
  using TraceError::TraceError;
};

/// An option is unknown, malformed or impossible. The message names the key, the value and what is allowed.
class ConfigError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A result cannot be written. The message names the file and the reason.
class OutputError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A device is missing, unsuitable or failed.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {
[[noreturn]] inline void contract_violated(const char* condition, const char* file, int line) {
  throw ContractViolation(std::string(file) + ":" + std::to_string(line) + ": expected " + condition);
}
}  // namespace detail

}  // namespace hae

/// Throws ContractViolation unless the condition holds; never compiled out.
#define HAE_EXPECTS(condition) \
  ((condition) ? static_cast<void>(0) : ::hae::detail::contract_violated(#condition, __FILE__, __LINE__))
