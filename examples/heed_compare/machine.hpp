// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "settings.hpp"

namespace compare {

// The first instruction set that the program was compiled for and this processor lacks, or null.
// Allocates nothing and calls nothing that could use those instructions.
[[nodiscard]] const char* missing_instruction_set();

struct Machine {
  std::string name, compiler, flags;
  int cores = 1;
};

[[nodiscard]] Machine this_machine();

}  // namespace compare
