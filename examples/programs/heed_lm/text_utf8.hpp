// SPDX-License-Identifier: Apache-2.0
#pragma once

// UTF-8 of this program's texts.

#include <heed/core/utf8.hpp>

#include <string>

namespace heed_lm {

using heed::Utf8;
using heed::utf8_step;
using heed::Utf8Step;

void append_utf8(char32_t code, std::string& text);

// The character as messages name it: U+0041 'A'.
[[nodiscard]] std::string character_name(char32_t code);

}  // namespace heed_lm
