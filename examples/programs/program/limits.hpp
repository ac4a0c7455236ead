// SPDX-License-Identifier: Apache-2.0
#pragma once

// The largest numbers that the programs accept in options and files.

#include <cstdint>

namespace heed_program {

inline constexpr int kMaxThreads = 1024;
inline constexpr std::int64_t kMaxSize = std::int64_t(1) << 20, kMaxSteps = std::int64_t(1) << 32;
inline constexpr double kMaxReal = 1e30;  // for rates and norms

}  // namespace heed_program
