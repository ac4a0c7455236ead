// SPDX-License-Identifier: Apache-2.0
#pragma once

// Errors as one sentence: require() and fail() put it together from its parts and throw. Parts may be bytes of
// a foreign file: whatever is no printable character is spelled out, so that the sentence is whole (what() ends
// at a NUL) and steers no terminal.

#include <heed/core/config.hpp>
#include <heed/core/utf8.hpp>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// Words, characters, numbers, and whatever has a text(). Streams would double the compile time of an op.
template <class Part>
void append(std::string& text, const Part& part) {
  if constexpr (requires { part.text(); }) {
    text += part.text();
  } else if constexpr (std::is_same_v<Part, char> || !std::is_arithmetic_v<Part>) {
    text += part;
  } else if constexpr (std::is_floating_point_v<Part>) {
    char digits[40];  // the fewest that are read back as the same number
    for (int count = 1; count <= std::numeric_limits<Part>::max_digits10; ++count) {
      std::snprintf(digits, sizeof digits, "%.*Lg", count, static_cast<long double>(part));
      if (static_cast<Part>(std::strtold(digits, nullptr)) == part) break;
    }
    text += digits;
  } else {
    text += std::to_string(part);
  }
}

// Bytes of the character in front; 0 where there is none of valid UTF-8, or a control character (C0, C1, DEL).
[[nodiscard]] inline std::size_t printable_bytes(std::string_view text) {
  const Utf8Step step = utf8_step(text, 0);
  const bool control = step.code < 0x20 || (step.code >= 0x7F && step.code < 0xA0);
  return step.kind == Utf8::character && !control ? step.bytes : 0;
}

}  // namespace detail

// The text with every byte that belongs to no printable character of UTF-8 in hexadecimal: backslash, x, 1B.
[[nodiscard]] inline std::string printable(std::string_view text) {
  constexpr const char* digits = "0123456789ABCDEF";
  std::string result;
  while (!text.empty()) {
    const std::size_t bytes = detail::printable_bytes(text);
    if (bytes > 0) {
      result += text.substr(0, bytes);
    } else {
      const unsigned byte = static_cast<unsigned char>(text[0]);
      result += "\\x";
      result += digits[byte >> 4];
      result += digits[byte & 0xFU];
    }
    text.remove_prefix(bytes > 0 ? bytes : 1);
  }
  return result;
}

namespace detail {

// What an error says: all parts joined.
template <class... Parts>
[[nodiscard]] std::string sentence(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return printable(text);
}

}  // namespace detail

// Throws std::invalid_argument with all parts joined: `fail("forward(dar): key has dim ", 48)`.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::invalid_argument(detail::sentence(parts...));
}

template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) fail(parts...);
}

// a * b for extents and strides; throws when the product does not fit an Index.
[[nodiscard]] inline Index checked_product(Index a, Index b, const char* what) {
  Index product;
  if (__builtin_mul_overflow(a, b, &product))
    fail(what, ": ", a, " x ", b, " overflows a 64-bit index");
  return product;
}

}  // namespace HEED_ABI
}  // namespace heed
