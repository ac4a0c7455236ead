// SPDX-License-Identifier: Apache-2.0
#pragma once

// Positions of tokens and other whole numbers of 32 bits, one SIMD register of them as a value, and the results of their
// comparisons. A mask's function (mask/visible.hpp) is written with this header:
//
//   (j <= i) & ((i - j) % 4 == 0 | j < 8)
//
// Sums, differences and products wrap around beyond 32 bits. A quotient is rounded towards 0, and a
// remainder has the sign of the dividend, as with int; quotient and remainder of a division by 0
// are 0. Comparisons are joined by & and | and negated by !.

#include <heed/simd/pack.hpp>

#include <concepts>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace heed {
inline namespace HEED_ABI {

namespace detail {
typedef std::int32_t PositionVector __attribute__((vector_size(kRegisterBytes)));
typedef std::uint32_t PositionBits __attribute__((vector_size(kRegisterBytes)));
}  // namespace detail

// Lane by lane, true or false.
struct Seen {
  detail::PositionVector v;  // -1 or 0

  explicit Seen(detail::PositionVector lanes) : v(lanes) {}
  Seen(bool all) : v(detail::PositionVector{} - std::int32_t(all)) {}
  friend Seen operator&(Seen a, Seen b) { return Seen(a.v & b.v); }
  friend Seen operator|(Seen a, Seen b) { return Seen(a.v | b.v); }
  friend Seen operator!(Seen a) { return Seen(~a.v); }

  // Used by &&, ||, ? : and if; the conversion is refused, since lanes may differ.
  template <std::same_as<bool> One>
  explicit operator One() const {
    static_assert(
        sizeof(One) == 0,
        "heed: a comparison of positions is a vector of answers: join them with & and | "
        "in place of && and ||, and take heed::select(which, a, b) in place of ? : and if "
        "(simd/positions.hpp)");
    return false;
  }
  // Lane k as bit k.
  [[nodiscard]] std::uint32_t bits() const {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask(__m512i(v), __m512i(v));
#elif defined(__FMA__)
    return std::uint32_t(_mm256_movemask_ps(__m256(v)));
#elif defined(__aarch64__)
    return vaddvq_u32(uint32x4_t(v) & uint32x4_t{1, 2, 4, 8});
#else
    std::uint32_t all = 0;
    for (int k = 0; k < kRegisterBytes / 4; ++k) all |= std::uint32_t(v[k] & 1) << k;
    return all;
#endif
  }
};

struct Positions {
  static constexpr int width = kRegisterBytes / int(sizeof(std::int32_t));
  using Vector = detail::PositionVector;
  using Bits = detail::PositionBits;

  Vector v;

  Positions() = default;
  explicit Positions(Vector vector) : v(vector) {}
  // Every lane holds the number, or the nearest one that 32 bits hold.
  template <std::integral U>
  requires(!std::is_same_v<U, bool>) Positions(U number) : v(nearest(number) - Vector{}) {}

  [[nodiscard]] static Positions iota() {
    Vector lanes;
    for (int k = 0; k < width; ++k) lanes[k] = k;
    return Positions(lanes);
  }
  [[nodiscard]] std::int32_t lane(int k) const { return v[k]; }

 private:
  template <class U>
  [[nodiscard]] static std::int32_t nearest(U number) {
    using Limits = std::numeric_limits<std::int32_t>;
    if (std::cmp_less(number, Limits::min())) return Limits::min();
    if (std::cmp_greater(number, Limits::max())) return Limits::max();
    return std::int32_t(number);
  }
};

[[nodiscard]] inline Positions operator+(Positions a, Positions b) {
  return Positions(Positions::Vector(Positions::Bits(a.v) + Positions::Bits(b.v)));
}
[[nodiscard]] inline Positions operator-(Positions a, Positions b) {
  return Positions(Positions::Vector(Positions::Bits(a.v) - Positions::Bits(b.v)));
}
[[nodiscard]] inline Positions operator*(Positions a, Positions b) {
  return Positions(Positions::Vector(Positions::Bits(a.v) * Positions::Bits(b.v)));
}
[[nodiscard]] inline Positions operator-(Positions a) { return Positions(0) - a; }
// Computes in double. The quotient of two 32-bit numbers is whole or at least 2^-31 away from any whole number, and double
// is wrong by at most 2^31 2^-53, so that truncation gives the right number.
[[nodiscard]] inline Positions operator/(Positions a, Positions b) {
  typedef double Doubles __attribute__((vector_size(kRegisterBytes)));
  typedef std::int32_t Half __attribute__((vector_size(kRegisterBytes / 2)));
  const Positions::Vector divisor = b.v == 0 ? Positions(1).v : b.v;
  // Works on half a register at a time: without optimisation, g++ 12 fails on vectors twice as wide as a register.
  Half over[2], under[2];
  std::memcpy(over, &a.v, sizeof over);
  std::memcpy(under, &divisor, sizeof under);
  for (int side = 0; side < 2; ++side)
    over[side] = __builtin_convertvector(__builtin_convertvector(over[side], Doubles) /
                                             __builtin_convertvector(under[side], Doubles),
                                         Half);
  Positions::Vector truncated;
  std::memcpy(&truncated, over, sizeof truncated);
  return Positions(b.v == 0 ? Positions::Vector{} : truncated);
}
[[nodiscard]] inline Positions operator%(Positions a, Positions b) {
  const Positions rest = a - a / b * b;
  return Positions(b.v == 0 ? Positions::Vector{} : rest.v);
}

[[nodiscard]] inline Seen operator<(Positions a, Positions b) { return Seen(a.v < b.v); }
[[nodiscard]] inline Seen operator<=(Positions a, Positions b) { return Seen(a.v <= b.v); }
[[nodiscard]] inline Seen operator>(Positions a, Positions b) { return Seen(a.v > b.v); }
[[nodiscard]] inline Seen operator>=(Positions a, Positions b) { return Seen(a.v >= b.v); }
[[nodiscard]] inline Seen operator==(Positions a, Positions b) { return Seen(a.v == b.v); }
[[nodiscard]] inline Seen operator!=(Positions a, Positions b) { return Seen(a.v != b.v); }

// numbers[at], lane by lane; every lane of `at` must be the place of a number.
[[nodiscard]] inline Positions gather(const std::int32_t* numbers, Positions at) {
#if defined(__AVX512F__)
  return Positions(Positions::Vector(_mm512_i32gather_epi32(__m512i(at.v), numbers, 4)));
#elif defined(__AVX2__) && defined(__FMA__)
  return Positions(Positions::Vector(_mm256_i32gather_epi32(numbers, __m256i(at.v), 4)));
#else
  Positions::Vector gathered;
  for (int k = 0; k < Positions::width; ++k) gathered[k] = numbers[at.v[k]];
  return Positions(gathered);
#endif
}

[[nodiscard]] inline Positions select(Seen which, Positions a, Positions b) {
  return Positions(which.v ? a.v : b.v);
}
[[nodiscard]] inline Seen select(Seen which, Seen a, Seen b) {
  return Seen((which.v & a.v) | (~which.v & b.v));
}
[[nodiscard]] inline Positions min(Positions a, Positions b) { return select(a < b, a, b); }
[[nodiscard]] inline Positions max(Positions a, Positions b) { return select(a > b, a, b); }
[[nodiscard]] inline Positions absolute(Positions a) { return max(a, -a); }

}  // namespace HEED_ABI
}  // namespace heed
