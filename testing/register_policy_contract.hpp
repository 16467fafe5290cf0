#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <string>
#include <utility>

#include "testing/policy_contract.hpp"

namespace hae::testing {

/// A GoogleTest case that fails with what a check throws.
class ContractTest : public ::testing::Test {
 public:
  using Check = std::function<void()>;
  explicit ContractTest(Check check) : check_(std::move(check)) {}

  void TestBody() override {
    try {
      check_();
    } catch (const std::exception& error) {
      FAIL() << error.what();
    }
  }

 private:
  Check check_;
};

/// Registers the properties as the test cases `suite.PROPERTY`.
inline void register_properties(const std::string& suite, const std::vector<PolicyProperty>& properties,
                                const MakePolicy& make, const ContractOptions& options = {}) {
  for (const PolicyProperty& property : properties) {
    ::testing::RegisterTest(suite.c_str(), property.name.c_str(), nullptr, nullptr, __FILE__, __LINE__, [=] {
      return new ContractTest([=] { check_property(property, make, options); });
    });
  }
}

/// Registers the whole contract of a policy, one test case a property. Call it before RUN_ALL_TESTS.
///
/// suite  a C++ identifier
inline void register_policy_contract(const std::string& suite, const MakePolicy& make,
                                     const ContractOptions& options = {}) {
  register_properties(suite, policy_contract(), make, options);
  if (make()->budget_is_open()) {
    register_properties(suite, budget_contract(), make, options);
  }
  ::testing::RegisterTest(suite.c_str(), "ItEvicts", nullptr, nullptr, __FILE__, __LINE__,
                          [=] { return new ContractTest([=] { check_evictions(make, options); }); });
}

}  // namespace hae::testing
