#pragma once

#include <string>
#include <vector>

#include "validate/kernels.h"

// Kernels to try the validator on: plain C++, right, and the same with one fault of the field each.

namespace hae::gallery {

/// One wrong library.
struct Mutant {
  const char* name;
  const char* operation;
  const char* said;  ///< what the validator has to say of it, among other words
};

const std::vector<Mutant>& mutants();

/// The table with one fault; the empty name is the right one. Resets what a fault remembers between calls.
/// throws  std::out_of_range for a name that is none
const hae_kernels* table_with(const std::string& fault);

}  // namespace hae::gallery
