// SPDX-License-Identifier: Apache-2.0
#include "text_utf8.hpp"

#include <cstdio>

namespace heed_lm {

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
