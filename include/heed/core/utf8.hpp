// SPDX-License-Identifier: Apache-2.0
#pragma once

// UTF-8 one character at a time, by the well-formed sequences of the Unicode standard (table 3-7):
// no surrogates, no overlong forms, nothing above U+10FFFF.

#include <heed/core/config.hpp>

#include <cstddef>
#include <string_view>

namespace heed {
inline namespace HEED_ABI {

enum class Utf8 {
  character,
  invalid,  // no character begins like this
  cut,      // the text ends inside what may become a character
};

struct Utf8Step {
  Utf8 kind;
  std::size_t bytes;  // at least 1; for an invalid sequence its longest valid beginning
  char32_t code;      // the character, else 0
};

namespace detail {

// Bytes of a character whose first byte is `lead`; 0 if no character begins with it.
[[nodiscard]] inline std::size_t utf8_length(unsigned lead) {
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return 0;
  return lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

[[nodiscard]] inline bool may_be_second(unsigned lead, unsigned byte) {
  const unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  return low <= byte && byte <= high;
}

}  // namespace detail

// The character at byte `at` of the text, which must be less than its size.
[[nodiscard]] inline Utf8Step utf8_step(std::string_view text, std::size_t at) {
  const auto byte_at = [&](std::size_t i) -> unsigned {
    return static_cast<unsigned char>(text[i]);
  };
  const unsigned lead = byte_at(at);
  const std::size_t length = detail::utf8_length(lead);
  if (length == 0) return {Utf8::invalid, 1, 0};
  if (length == 1) return {Utf8::character, 1, lead};
  char32_t code = lead & (0x7FU >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if (at + i == text.size()) return {Utf8::cut, i, 0};
    const unsigned byte = byte_at(at + i);
    const bool fits = i == 1 ? detail::may_be_second(lead, byte) : (byte & 0xC0U) == 0x80U;
    if (!fits) return {Utf8::invalid, i, 0};
    code = code << 6 | (byte & 0x3FU);
  }
  return {Utf8::character, length, code};
}

}  // namespace HEED_ABI
}  // namespace heed
