// SPDX-License-Identifier: Apache-2.0
#pragma once

// Errors as one sentence: require() and fail() put it together from its parts and throw.

#include <heed/core/config.hpp>

#include <cstdio>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace heed::inline HEED_ABI {

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

}  // namespace detail

// Throws std::invalid_argument with all parts joined: `fail("forward(dar): key has dim ", 48)`.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::string text;
  (detail::append(text, parts), ...);
  throw std::invalid_argument(text);
}

template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) fail(parts...);
}

// a * b for extents and strides; throws when the product does not fit an Index.
[[nodiscard]] inline Index checked_product(Index a, Index b, const char* what) {
  Index product;
  if (__builtin_mul_overflow(a, b, &product)) fail(what, ": ", a, " x ", b, " overflows a 64-bit index");
  return product;
}

}  // namespace heed::inline HEED_ABI
