// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "checkpoint.hpp"

namespace heed_lm {

// Throws std::runtime_error, one sentence that begins with the path, at the first number that is not finite, of the weights,
// of what layers keep beside them, and of the optimiser's moments, and at a second moment below 0.
void require_finite(Run& run, const std::filesystem::path& path);

}  // namespace heed_lm
