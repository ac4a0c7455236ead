// SPDX-License-Identifier: Apache-2.0
#include "text_utf8.hpp"

#include <algorithm>
#include <cstdio>

namespace heed_lm {

namespace {

[[nodiscard]] unsigned byte_at(std::string_view text, std::size_t at) {
  return static_cast<unsigned char>(text[at]);
}

// The number of bytes of a character that begins with this byte; 0 if none does.
[[nodiscard]] std::size_t length_from(unsigned lead) {
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return 0;
  return lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

[[nodiscard]] bool may_be_second(unsigned lead, unsigned byte) {
  const unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  return low <= byte && byte <= high;
}

}  // namespace

Utf8Step utf8_step(std::string_view text, std::size_t at) {
  const unsigned lead = byte_at(text, at);
  const std::size_t length = length_from(lead);
  if (length == 0) return {Utf8::invalid, 1, 0};
  if (length == 1) return {Utf8::character, 1, lead};
  char32_t code = lead & (0x7FU >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if (at + i == text.size()) return {Utf8::cut, i, 0};
    const unsigned byte = byte_at(text, at + i);
    const bool fits = i == 1 ? may_be_second(lead, byte) : (byte & 0xC0U) == 0x80U;
    if (!fits) return {Utf8::invalid, i, 0};
    code = code << 6 | (byte & 0x3FU);
  }
  return {Utf8::character, length, code};
}

void append_utf8(char32_t code, std::string& text) {
  const auto tail = [&](int shift) { text += char(0x80U | (code >> shift & 0x3FU)); };
  if (code < 0x80) {
    text += char(code);
  } else if (code < 0x800) {
    text += char(0xC0U | code >> 6);
    tail(0);
  } else if (code < 0x10000) {
    text += char(0xE0U | code >> 12);
    tail(6);
    tail(0);
  } else {
    text += char(0xF0U | code >> 18);
    tail(12);
    tail(6);
    tail(0);
  }
}

std::string character_name(char32_t code) {
  char hex[16];
  std::snprintf(hex, sizeof hex, "U+%04X", unsigned(code));
  std::string name = hex;
  const bool control = code < 0x20 || (code >= 0x7F && code < 0xA0);
  if (control) return name;
  name += " '";
  append_utf8(code, name);
  return name + "'";
}

}  // namespace heed_lm
