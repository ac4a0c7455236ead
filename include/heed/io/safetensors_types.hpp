// SPDX-License-Identifier: Apache-2.0
#pragma once

// Parts that the safetensors reader and writer share: limits, dtypes and their C++ types, exact
// conversion between types, and the wording of messages.

#include <heed/core/error.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace io {

struct TensorInfo {
  std::string dtype;
  std::vector<Index> shape;        // no extent: a scalar
  std::size_t begin = 0, end = 0;  // bytes, counted from the end of the header
};

namespace safetensors_limits {
inline constexpr std::uint64_t header_bytes = 100'000'000;
inline constexpr std::size_t tensors = 65'536;
inline constexpr std::size_t name_bytes = 1024;
inline constexpr std::size_t extents = 8;
}  // namespace safetensors_limits

// Bytes per element; 0 for a dtype that the format does not know.
[[nodiscard]] inline std::size_t dtype_width(std::string_view dtype) {
  const auto is_one_of = [dtype](std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), dtype) != names.end();
  };
  if (is_one_of({"F64", "I64", "U64"})) return 8;
  if (is_one_of({"F32", "I32", "U32"})) return 4;
  if (is_one_of({"F16", "BF16", "I16", "U16"})) return 2;
  if (is_one_of({"BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2"})) return 1;
  return 0;
}

// Product of extents and width; nothing when an extent is negative, or when the product of the
// width and the non-zero extents, from which strides are made, overflows an Index.
[[nodiscard]] inline std::optional<std::size_t> tensor_bytes(const std::vector<Index>& shape,
                                                             std::size_t width) {
  auto product = static_cast<Index>(width);
  bool empty = false;
  for (const Index extent : shape) {
    if (extent < 0) return std::nullopt;
    empty = empty || extent == 0;
    if (extent == 0) continue;
    if (product > std::numeric_limits<Index>::max() / extent) return std::nullopt;
    product *= extent;
  }
  return empty ? 0 : static_cast<std::size_t>(product);
}

// A name for a message: at most 80 bytes, cut at a character, control characters shown as '?'.
[[nodiscard]] inline std::string in_quotes(const std::string& name) {
  std::size_t length = std::min<std::size_t>(name.size(), 80);
  const bool cut = length < name.size();
  while (cut && length > 0 && (static_cast<unsigned char>(name[length]) & 0xC0U) == 0x80U) --length;
  std::string text = name.substr(0, length);
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t bytes = heed::detail::printable_bytes(std::string_view(text).substr(at));
    if (bytes == 0) text[at] = '?';
    at += std::max<std::size_t>(bytes, 1);
  }
  return "'" + text + (cut ? "...'" : "'");
}

template <class... Parts>
[[noreturn]] void refuse(const std::string& source, const Parts&... parts) {
  throw std::runtime_error(heed::detail::sentence(source, ": ", parts...));
}

template <class Real, class... Others>
concept AnyOf = (std::same_as<Real, Others> || ...);

// The C++ types of a tensor's elements: bool, the integers of 8 to 64 bits, float and double.
template <class Real>
concept Element = AnyOf<Real, bool, float, double, signed char, short, int, long, long long,
                        unsigned char, unsigned short, unsigned, unsigned long, unsigned long long>;

// Element types for which every bit pattern is a value; a stored BOOL byte may be neither 0 nor 1.
template <class Real>
concept Viewable = Element<Real> && !std::same_as<Real, bool>;

template <Element Real>
[[nodiscard]] constexpr std::string_view dtype_of() {
  constexpr std::array<std::string_view, 4> of_signed{"I8", "I16", "I32", "I64"};
  constexpr std::array<std::string_view, 4> of_unsigned{"U8", "U16", "U32", "U64"};
  constexpr std::size_t log2_size = std::bit_width(sizeof(Real)) - 1;
  if constexpr (std::same_as<Real, bool>)
    return "BOOL";
  else if constexpr (std::floating_point<Real>)
    return sizeof(Real) == 4 ? "F32" : "F64";
  else
    return std::signed_integral<Real> ? of_signed[log2_size] : of_unsigned[log2_size];
}

// True if To holds the number `from` without any rounding; NaN and infinity pass between floats.
template <Element To, Element From>
[[nodiscard]] bool fits_exactly(From from) {
  using Limits = std::numeric_limits<To>;
  if constexpr (std::same_as<To, From> || std::same_as<From, bool>) {
    return true;
  } else if constexpr (std::same_as<To, bool>) {
    return from == From{0} || from == From{1};
  } else if constexpr (std::integral<To> && std::integral<From>) {
    return std::in_range<To>(from);
  } else if constexpr (std::integral<To>) {
    // -2^k and 2^k are exact in From; the largest integer, 2^k - 1, may not be.
    return from >= static_cast<From>(Limits::min()) && from < std::ldexp(From{1}, Limits::digits) &&
           from == std::trunc(from);
  } else if constexpr (std::integral<From>) {
    const To rounded = static_cast<To>(from);
    return fits_exactly<From>(rounded) && static_cast<From>(rounded) == from;
  } else {
    if (!std::isfinite(from)) return true;
    if constexpr (sizeof(To) < sizeof(From))
      if (std::abs(from) > static_cast<From>(Limits::max())) return false;
    return static_cast<From>(static_cast<To>(from)) == from;
  }
}

inline void require_little_endian(const std::string& source) {
  if constexpr (std::endian::native != std::endian::little)
    refuse(source, "the file is little-endian, this host is not");
}

}  // namespace io
}  // namespace HEED_ABI
}  // namespace heed
