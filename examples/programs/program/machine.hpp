// SPDX-License-Identifier: Apache-2.0
#pragma once

// The machine that a program runs on, and the instructions that it was compiled for.

#include <string>

namespace heed_program {

// The first instruction set that the program was compiled for but this processor lacks, or null. The function must not
// itself use such instructions: it allocates nothing and calls nothing of the library.
[[nodiscard]] const char* missing_instruction_set();

struct Machine {
  std::string name;  // name of the processor
  std::string kind;  // its class if heed was measured on one like it, such as "Zen 5", else vendor,
                     // family and model; and its widest instructions
  std::string compiler, flags;
  int cores = 1;
};

[[nodiscard]] Machine this_machine();

// `kind` by the text of /proc/cpuinfo.
[[nodiscard]] std::string machine_kind(const std::string& cpuinfo);

}  // namespace heed_program
