// SPDX-License-Identifier: Apache-2.0
#pragma once

// Files of heed_lm that hold text.

#include <string>

namespace heed_lm {

// The expected content of a file: JSON and the like, a text in any language, also HTML, or any bytes.
enum class Content { structured, text, bytes };

// All bytes of a file; throws std::runtime_error with one sentence when it cannot be read, or begins like a file of another
// kind (heed/io/foreign_file.hpp).
[[nodiscard]] std::string read_text_file(const std::string& path,
                                         Content content = Content::structured);

}  // namespace heed_lm
