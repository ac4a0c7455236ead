// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace heed_lm {

// All bytes of a file; throws std::runtime_error with one sentence when it cannot be read.
[[nodiscard]] std::string read_text_file(const std::string& path);

}  // namespace heed_lm
