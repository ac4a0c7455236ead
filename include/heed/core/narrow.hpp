// SPDX-License-Identifier: Apache-2.0
#pragma once

// The 16-bit formats in which tensors may be stored. heed computes with float: it widens these numbers, which float
// holds exactly, and rounds results to the nearest of them, ties to even.
//
//   bfloat16   8 bits of exponent, 8 of precision: the range of float, unit roundoff 2^-8
//   half       5 bits of exponent, 11 of precision (IEEE 754 binary16): up to 65504, unit roundoff 2^-11
//
// Numbers beyond the largest one become infinite, subnormal numbers are kept, NaN stays NaN.

#include <heed/core/config.hpp>

#include <bit>
#include <concepts>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// Bits is std::uint32_t and Float is float, or both are vectors of them of one size. Narrow numbers
// stand in the lower 16 bits.
struct Bfloat16Format {
  static constexpr int digits = 8;

  template <class Float, class Bits>
  [[nodiscard]] static constexpr Bits widened(Bits narrow) {
    return narrow << 16;
  }
  template <class Float, class Bits>
  [[nodiscard]] static constexpr Bits narrowed(Bits x) {
    const Bits rounded = (x + (0x7FFFU + (x >> 16 & 1U))) >> 16;
    return (x & 0x7FFFFFFFU) > 0x7F800000U ? (x >> 16 | 0x40U) : rounded;
  }
};

struct HalfFormat {
  static constexpr int digits = 11;
  // The exponents of half and float are biased by 15 and 127.
  static constexpr std::uint32_t rebase = 112U << 23;

  template <class Float, class Bits>
  [[nodiscard]] static constexpr Bits widened(Bits narrow) {
    const Bits size = (narrow & 0x7FFFU) << 13, rebased = size + rebase;
    // 2^-14 (1 + fraction) - 2^-14
    const Bits tiny =
        std::bit_cast<Bits>(Float(std::bit_cast<Float>(Bits(size + (113U << 23))) - 0x1p-14F));
    const Bits finite = size < (1U << 23) ? tiny : rebased;
    return (size >= (31U << 23) ? rebased + rebase : finite) | (narrow & 0x8000U) << 16;
  }
  template <class Float, class Bits>
  [[nodiscard]] static constexpr Bits narrowed(Bits x) {
    const Bits size = x & 0x7FFFFFFFU;
    const Bits rounded = (size + (0xFFFU + (size >> 13 & 1U)) - rebase) >> 13;
    // Floats near 0.5 are as far apart as the smallest halves.
    const Bits tiny = std::bit_cast<Bits>(Float(std::bit_cast<Float>(size) + 0.5F)) - 0x3F000000U;
    const Bits finite = size < (113U << 23) ? tiny : rounded;
    const Bits infinite = size * 0U + 0x7C00U, nan = (size >> 13 & 0x3FFU) | 0x7E00U;
    const Bits beyond = size > 0x7F800000U ? nan : infinite;
    return (size >= 0x477FF000U ? beyond : finite) | (x >> 16 & 0x8000U);
  }
};

}  // namespace detail

// A number of 16 bits. Format converts it to a float and back.
template <class Format>
class NarrowFloat {
 public:
  static constexpr int digits = Format::digits;  // precision in bits

  NarrowFloat() = default;
  // The nearest number, ties to even.
  explicit constexpr NarrowFloat(float x)
      : bits_(static_cast<std::uint16_t>(
            Format::template narrowed<float>(std::bit_cast<std::uint32_t>(x)))) {}
  constexpr operator float() const {
    return std::bit_cast<float>(Format::template widened<float>(std::uint32_t{bits_}));
  }

  // Conversions of vectors: 16-bit numbers in the lower halves of 32-bit words, to floats and back.
  template <class Float, class Bits>
  [[nodiscard]] static constexpr Bits widened(Bits narrow) {
    return Format::template widened<Float>(narrow);
  }
  template <class Float, class Bits>
  [[nodiscard]] static constexpr Bits narrowed(Bits x) {
    return Format::template narrowed<Float>(x);
  }

 private:
  std::uint16_t bits_;
};

using bfloat16 = NarrowFloat<detail::Bfloat16Format>;
using half = NarrowFloat<detail::HalfFormat>;

template <class Number>
concept NarrowNumber = std::same_as<Number, bfloat16> || std::same_as<Number, half>;

// The type that heed computes with where numbers of this type are stored: float for 16-bit numbers,
// and for int8 with a scale per row.
template <class Number>
using ArithmeticOf =
    std::conditional_t<NarrowNumber<Number> || std::same_as<Number, std::int8_t>, float, Number>;

namespace detail {

// True if From, a number type of another library, has the format To. Eigen's 16-bit types and those
// of compilers are known by their size and std::numeric_limits.
template <class From, class To>
inline constexpr bool same_format = false;
template <class From, NarrowNumber To>
inline constexpr bool same_format<From, To> =
    !std::same_as<From, To> && sizeof(From) == sizeof(To) &&
    std::numeric_limits<From>::is_specialized && !std::numeric_limits<From>::is_integer &&
    std::numeric_limits<From>::digits == To::digits;

}  // namespace detail

}  // namespace HEED_ABI
}  // namespace heed
