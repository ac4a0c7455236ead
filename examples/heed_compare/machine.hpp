// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "settings.hpp"

namespace compare {

// The first instruction set that the program was compiled for but this processor lacks, or null. The function must not
// itself use such instructions: it allocates nothing and calls nothing of the library.
[[nodiscard]] const char* missing_instruction_set();

struct Machine {
  std::string name, compiler, flags;
  int cores = 1;
};

[[nodiscard]] Machine this_machine();

}  // namespace compare
