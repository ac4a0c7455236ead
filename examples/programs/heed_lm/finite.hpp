// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "checkpoint.hpp"

#include <span>

namespace heed_lm {

// Throws std::runtime_error at the first number that is not finite; `name` is its name in the file `path`.
void require_finite(std::span<const float> numbers, const std::string& name,
                    const std::filesystem::path& path);

// Throws std::runtime_error, one sentence that begins with the path, at the first number that is not finite, of the weights,
// of what layers keep beside them, and of the optimiser's moments, and at a second moment below 0.
void require_finite(Run& run, const std::filesystem::path& path);

}  // namespace heed_lm
