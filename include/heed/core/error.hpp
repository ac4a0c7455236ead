// SPDX-License-Identifier: Apache-2.0
#pragma once

// An error is one sentence. require() and fail() join it from parts and throw it as std::invalid_argument. A part may hold
// bytes of a foreign file: bytes that belong to no printable character are written in hexadecimal, so that a NUL does not
// cut the sentence off in what(), and no escape sequence reaches a terminal.

#include <heed/core/config.hpp>
#include <heed/core/utf8.hpp>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// Appends a part: a string, a character, a number, or a value with a member text(). Streams would double the
// compile time of an op.
template <class Part>
void append(std::string& text, const Part& part) {
  if constexpr (requires { part.text(); }) {
    text += part.text();
  } else if constexpr (std::is_same_v<Part, char> || !std::is_arithmetic_v<Part>) {
    text += part;
  } else if constexpr (std::is_floating_point_v<Part>) {
    if (part > Part(-1e6) && part < Part(1e6) && part == Part(int(part)))
      return append(text, int(part));  // 30, not 3e+01
    char digits[40];                   // shortest text that reads back as the same number
    for (int count = 1; count <= std::numeric_limits<Part>::max_digits10; ++count) {
      std::snprintf(digits, sizeof digits, "%.*Lg", count, static_cast<long double>(part));
      if (static_cast<Part>(std::strtold(digits, nullptr)) == part) break;
    }
    text += digits;
  } else {
    text += std::to_string(part);
  }
}

// The number of bytes of the character that `text` begins with; 0 if they are not valid UTF-8, or if it is a
// control character (C0, C1, DEL).
[[nodiscard]] inline std::size_t printable_bytes(std::string_view text) {
  const Utf8Step step = utf8_step(text, 0);
  const bool control = step.code < 0x20 || (step.code >= 0x7F && step.code < 0xA0);
  return step.kind == Utf8::character && !control ? step.bytes : 0;
}

}  // namespace detail

// The text with every byte that belongs to no printable UTF-8 character written in hexadecimal.
[[nodiscard, gnu::cold]] inline std::string printable(std::string_view text) {
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

// One part of a sentence, of any type: joining a list of parts is compiled once, and not for each list of types.
class Part {
 public:
  Part(const char* text) : of_(text), append_(&append_text) {}
  template <class Value>
  Part(const Value& value) : of_(&value), append_(&append_value<Value>) {}
  void append_to(std::string& text) const { append_(text, of_); }

 private:
  static void append_text(std::string& text, const void* of) {
    text += static_cast<const char*>(of);
  }
  template <class Value>
  [[gnu::cold]] static void append_value(std::string& text, const void* of) {
    append(text, *static_cast<const Value*>(of));
  }

  const void* of_;
  void (*append_)(std::string&, const void*);
};

// All parts joined and made printable.
[[nodiscard, gnu::cold, gnu::noinline]] inline std::string joined(
    std::initializer_list<Part> parts) {
  std::string text;
  for (const Part& part : parts) part.append_to(text);
  return printable(text);
}
template <class... Parts>
[[nodiscard]] std::string sentence(const Parts&... parts) {
  return joined({Part(parts)...});
}

[[noreturn, gnu::cold, gnu::noinline]] inline void throw_joined(std::initializer_list<Part> parts) {
  throw std::invalid_argument(joined(parts));
}

}  // namespace detail

// Throws std::invalid_argument with all parts joined: `fail("forward(dar): key has dim ", 48)`.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  detail::throw_joined({detail::Part(parts)...});
}

// Throws what fail(parts...) throws unless `condition` is true.
template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) detail::throw_joined({detail::Part(parts)...});
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
