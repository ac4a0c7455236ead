// SPDX-License-Identifier: Apache-2.0
#pragma once

// Builds without the zoo (HEED_ZOO=OFF).

#include <string>

namespace zoo {

// True for "zoo" and for the names of its variants in a build without the zoo. The words are the
// end of a sentence about it.
[[nodiscard]] bool is_left_out(const std::string& name);
inline constexpr const char* kLeftOut =
    "this build has no zoo: it was configured with HEED_ZOO=OFF";

}  // namespace zoo
