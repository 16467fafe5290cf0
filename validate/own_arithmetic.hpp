#pragma once

#include <cfenv>
#include <utility>

namespace hae::validate {

/// The validator's floating-point arithmetic, apart from the kernels': a library that is linked for fast math
/// flushes subnormal numbers to zero in the whole thread from the moment it is loaded.
///
/// While one is alive the arithmetic is the default one; a kernel is called with what was there before.
class OwnArithmetic {
 public:
  OwnArithmetic() {
    if (depth_++ == 0) {
      std::fegetenv(&theirs_);
      std::fesetenv(FE_DFL_ENV);
    }
  }
  ~OwnArithmetic() {
    if (--depth_ == 0) {
      std::fesetenv(&theirs_);
    }
  }
  OwnArithmetic(const OwnArithmetic&) = delete;
  OwnArithmetic& operator=(const OwnArithmetic&) = delete;

  /// Gives the kernels their arithmetic back, for as long as this lives.
  class Theirs {
   public:
    Theirs() { std::fesetenv(&theirs_); }
    ~Theirs() {
      std::fegetenv(&theirs_);
      std::fesetenv(FE_DFL_ENV);
    }
    Theirs(const Theirs&) = delete;
    Theirs& operator=(const Theirs&) = delete;
  };

 private:
  static inline thread_local int depth_ = 0;
  static inline thread_local std::fenv_t theirs_{};
};

}  // namespace hae::validate
