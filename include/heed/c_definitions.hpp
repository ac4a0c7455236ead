// SPDX-License-Identifier: Apache-2.0
#pragma once

// The functions of c.h, defined: one C++ file of a program or library includes this header and links heed::compiled, and C
// code, or another language's, then calls heed there. It computes with the instruction set that the file is compiled for.
// The library libheed, which CMake builds on request (-DHEED_BUILD_C=ON), holds code for several
// instruction sets and chooses among them (c/instance.hpp, c/dispatch.hpp).

#include <heed/c/dispatch.hpp>
#include <heed/c/instance.hpp>
#include <heed/compiled.hpp>

namespace heed_c {

inline const Library& own_library() {
  static constexpr Instance instances[] = {
      {"native", &heed::c::table<heed::c::BuiltInVariants>, &runs_everywhere}};
  static constexpr Library all{instances, 1};
  return all;
}
const Library& library() { return own_library(); }

}  // namespace heed_c
