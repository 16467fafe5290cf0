#include <gtest/gtest.h>

#include <iostream>

#include "cuda/memory.hpp"

/// Runs the tests where the build's Thrust system can; elsewhere says why not, in one line, and ends with the
/// exit code that ctest takes for skipped.
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  constexpr int kSkipped = 77;
  try {
    hae::device::check_device();
  } catch (const hae::DeviceError& error) {
    std::cout << "skipped: " << error.what() << '\n';
    return kSkipped;
  }
  std::cout << "Thrust system " << hae::device::system_name() << '\n';
  return RUN_ALL_TESTS();
}
