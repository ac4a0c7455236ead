// SPDX-License-Identifier: Apache-2.0
#pragma once

// UTF-8 one character at a time, by the well-formed sequences of the Unicode standard (table 3-7):
// no surrogates, no overlong forms, nothing above U+10FFFF.

#include <cstddef>
#include <string>
#include <string_view>

namespace heed_lm {

enum class Utf8 {
  character,
  invalid,  // no text goes on like this
  cut,      // the text ends inside of what may become a character
};

struct Utf8Step {
  Utf8 kind;
  std::size_t bytes;  // at least 1; of an invalid sequence its longest valid beginning
  char32_t code;      // of a character, else 0
};

// The character, or the faulty bytes, at byte `at` of the text; `at` must be less than its size.
[[nodiscard]] Utf8Step utf8_step(std::string_view text, std::size_t at);

void append_utf8(char32_t code, std::string& text);

// The character as messages name it: U+0041 'A'.
[[nodiscard]] std::string character_name(char32_t code);

}  // namespace heed_lm
