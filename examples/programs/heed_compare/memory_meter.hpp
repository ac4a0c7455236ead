// SPDX-License-Identifier: Apache-2.0
#pragma once

// Counts the memory that the program holds through operator new, which memory_meter.cpp replaces.
// Thread stacks and the memory of the OpenMP runtime are not counted.

#include <heed/core/config.hpp>

namespace compare {

// Largest number of bytes held at once since the meter was made, beyond those held then.
class MemoryMeter {
 public:
  MemoryMeter();
  [[nodiscard]] heed::Index peak_bytes() const;

 private:
  heed::Index before_;
};

}  // namespace compare
