// SPDX-License-Identifier: Apache-2.0
#pragma once

// Pairs of bfloat16 as elements of matrix products with float sums. panel_gemm() takes half as many
// steps with them: its depth counts pairs.
//
//   sum = fma(a.second, b.second, sum);   sum = fma(a.first, b.first, sum)
//
// Each of the two is rounded to the nearest float, ties to even; subnormal operands count as 0, subnormal results
// become 0, each with its sign. Where the file is compiled for AVX-512 BF16, this is the instruction VDPBF16PS;
// elsewhere it is the same arithmetic in several instructions, which takes longer than a product of floats. Where the file is
// compiled for Arm with BF16, it is the instruction BFDOT,
//
//   sum = odd(sum + odd(a.first b.first + a.second b.second))
//
// where odd(x) is x if a float holds it, else that of the two floats beside x whose last bit is 1.
//
// Rounding  to the nearest bfloat16, ties to even: of a normal number at most by its 2^-8th part (kBfloatRoundoff).
//           Subnormal floats become 0. Numbers above 2^128 (1 - 2^-9) become infinite, NaN stays NaN.
// Bounds    where a result lies within 2^-149 of 2^-126, the smallest normal number, VDPBF16PS and the other code may
//           differ: one tests before rounding, the other after it, whether the result is subnormal.
//           BFDOT's sum of two products overflows where it is 2^128 or more, whatever is added to it.
// Source    Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VDPBF16PS and VCVTNE2PS2BF16;
//           Arm Architecture Reference Manual, BFDOT with FPCR.EBF = 0.

#include <heed/core/narrow.hpp>
#include <heed/simd/panel_gemm.hpp>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

namespace heed {
inline namespace HEED_ABI {

// Two bfloat16: the first in the lower 16 bits.
struct BfloatPair {
  std::uint32_t bits;
};

// The largest relative error of a float that is rounded to bfloat16.
inline constexpr double kBfloatRoundoff = 0x1p-8;

// True if the processor that the file is compiled for has instructions for products of pairs; the flag that asks for them.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
inline constexpr bool kHasPairProducts = true;
#else
inline constexpr bool kHasPairProducts = false;
#endif
#if defined(__aarch64__)
inline constexpr const char* kPairProductsFlag = "-march=armv8.2-a+bf16";
#else
inline constexpr const char* kPairProductsFlag = "-mavx512bf16";
#endif

// Number of pairs that hold n numbers.
[[nodiscard]] constexpr Index pairs_of(Index n) { return (n + 1) / 2; }

namespace detail {

using PairBits = Pack<float>::Bits;
typedef std::uint32_t PairMemory __attribute__((vector_size(kRegisterBytes), aligned(4)));

[[nodiscard]] inline PairBits load_pairs(const BfloatPair* from) {
  return PairBits(*reinterpret_cast<const PairMemory*>(&from->bits));
}
inline void store_pairs(PairBits pairs, BfloatPair* to) {
  *reinterpret_cast<PairMemory*>(&to->bits) = pairs;
}

// Sets subnormal floats to 0. Bits is std::uint32_t or a vector of them.
template <class Bits>
[[nodiscard]] inline Bits flushed(Bits x) {
  return (x & 0x7F800000U) == 0U ? x & 0x80000000U : x;
}

// A float as a bfloat16 in the lower 16 bits.
template <class Float, class Bits>
[[nodiscard]] inline Bits rounded_bits(Bits x) {
  return Bfloat16Format::narrowed<Float>(flushed(x));
}

// a * b + sum, rounded once: the product of two bfloat16 is exact in double, and its sum with a float is rounded to 53
// bits, twice the 24 of float and two more, at which rounding twice equals rounding once.
[[nodiscard]] inline Pack<float> add_exact_product(PairBits a, PairBits b, Pack<float> sum) {
  using Vector = Pack<float>::Vector;
  const Vector x = Vector(a), y = Vector(b);
  if constexpr (kFusesMultiplyAdd) return fused_multiply_add(x, y, sum.v);
  Vector result;
  for (int i = 0; i < kLanes<float>; ++i)
    result[i] = float(double(x[i]) * double(y[i]) + double(sum.v[i]));
  return result;
}

// One half of the sum at the head of the file; a and b hold bfloat16 in their upper 16 bits.
[[nodiscard]] inline Pack<float>::Vector add_half(PairBits a, PairBits b, Pack<float>::Vector sum) {
  using Vector = Pack<float>::Vector;
  const Pack<float> result =
      add_exact_product(flushed(a), flushed(b), Vector(flushed(PairBits(sum))));
  return Vector(flushed(PairBits(result.v)));
}

// Lanes 0, 2, 4 ... (Odd = 0), or 1, 3, 5 ... (Odd = 1), of two vectors.
template <int Odd, int... L>
[[nodiscard]] inline Pack<float> every_second(Pack<float> a, Pack<float> b,
                                              std::integer_sequence<int, L...>) {
  return Pack<float>::Vector(__builtin_shufflevector(a.v, b.v, (2 * L + Odd)...));
}

// Lane i: first[i] and second[i], rounded.
[[nodiscard]] inline PairBits paired(Pack<float> first, Pack<float> second) {
#if defined(__AVX512BF16__)
  // VCVTNE2PS2BF16 leaves the two vectors one behind the other.
  typedef std::uint16_t Halves __attribute__((vector_size(kRegisterBytes)));
  const auto side_by_side = [&]<int... L>(std::integer_sequence<int, L...>) {
    const Halves halves = Halves(_mm512_cvtne2ps_pbh(second.v, first.v));
    return PairBits(__builtin_shufflevector(halves, halves, (L / 2 + L % 2 * kLanes<float>)...));
  };
  return side_by_side(std::make_integer_sequence<int, 2 * kLanes<float>>{});
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const auto halves = [](Pack<float> x) {
    return uint16x8_t(vcvtq_low_bf16_f32(float32x4_t(flushed(PairBits(x.v)))));
  };
  return PairBits(vzip1q_u16(halves(first), halves(second)));
#else
  using Vector = Pack<float>::Vector;
  return rounded_bits<Vector>(PairBits(first.v)) | rounded_bits<Vector>(PairBits(second.v)) << 16;
#endif
}

// Lane i: numbers 2 i and 2 i + 1 of `low` and `high`, one behind the other, rounded.
[[nodiscard]] inline PairBits paired_in_order(Pack<float> low, Pack<float> high) {
#if defined(__AVX512BF16__)
  return PairBits(_mm512_cvtne2ps_pbh(high.v, low.v));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const auto lanes = [](Pack<float> x) { return float32x4_t(flushed(PairBits(x.v))); };
  return PairBits(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(lanes(low)), lanes(high)));
#else
  constexpr auto lanes = std::make_integer_sequence<int, kLanes<float>>{};
  return paired(every_second<0>(low, high, lanes), every_second<1>(low, high, lanes));
#endif
}

template <>
struct Elements<BfloatPair> {
  using Sum = float;
  using Vector = PairBits;
  [[nodiscard]] static Vector load(const BfloatPair* from) { return load_pairs(from); }
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  [[nodiscard]] static Vector broadcast(const BfloatPair& x) { return first_lane<Vector>(x.bits); }
#else
  [[nodiscard]] static Vector broadcast(BfloatPair x) { return x.bits - Vector{}; }
#endif
  [[nodiscard, gnu::always_inline]] static VectorOf<float> add_product(Vector a, Vector b,
                                                                       VectorOf<float> sum) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, __m512bh(a), __m512bh(b));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    // clang copies the lane to all others before the intrinsic of this instruction: four fifths of the speed.
    asm("bfdot %0.4s, %2.8h, %1.2h[0]" : "+w"(sum) : "w"(a), "w"(b));
    return sum;
#else
    constexpr std::uint32_t second = 0xFFFF0000U;
    return add_half(a << 16, b << 16, add_half(a & second, b & second, sum));
#endif
  }
};

}  // namespace detail

// x rounded as products of pairs round it.
[[nodiscard]] inline float rounded_to_bfloat(float x) {
  return std::bit_cast<float>(detail::rounded_bits<float>(std::bit_cast<std::uint32_t>(x)) << 16);
}
[[nodiscard]] inline Pack<float> rounded_to_bfloat(Pack<float> x) {
  using Vector = Pack<float>::Vector;
  return Vector(detail::rounded_bits<Vector>(detail::PairBits(x.v)) << 16);
}

// The pair of two numbers, rounded.
[[nodiscard]] inline BfloatPair pair_of(float first, float second) {
  const auto rounded = [](float x) {
    return detail::rounded_bits<float>(std::bit_cast<std::uint32_t>(x));
  };
  return {rounded(first) | rounded(second) << 16};
}

// to[r][k] = rows[r][2 k], rows[r][2 k + 1]: pairs along the columns. An odd last column is paired with 0.
[[gnu::noinline]] inline void pair_columns(const float* rows, Index stride, Index count,
                                           Index columns, BfloatPair* to, Index to_stride) {
  constexpr Index W = kLanes<float>;
  for (Index r = 0; r < count; ++r, rows += stride, to += to_stride) {
    Index c = 0;
    for (; c + 2 * W <= columns; c += 2 * W)
      detail::store_pairs(
          detail::paired_in_order(Pack<float>::load(rows + c), Pack<float>::load(rows + c + W)),
          to + c / 2);
    for (; c < columns; c += 2) to[c / 2] = pair_of(rows[c], c + 1 < columns ? rows[c + 1] : 0.0F);
  }
}

// to[k][c] = rows[2 k][c], rows[2 k + 1][c]: pairs along the rows. An odd last row is paired with zeros.
[[gnu::noinline]] inline void pair_rows(const float* rows, Index stride, Index count, Index columns,
                                        BfloatPair* to, Index to_stride) {
  constexpr Index W = kLanes<float>;
  for (Index r = 0; r < count; r += 2, rows += 2 * stride, to += to_stride) {
    const bool whole = r + 1 < count;
    const float* below = rows + stride;
    Index c = 0;
    for (; c + W <= columns; c += W)
      detail::store_pairs(detail::paired(Pack<float>::load(rows + c),
                                         whole ? Pack<float>::load(below + c) : Pack<float>(0.0F)),
                          to + c);
    for (; c < columns; ++c) to[c] = pair_of(rows[c], whole ? below[c] : 0.0F);
  }
}

// True if both numbers of every pair are finite.
[[nodiscard, gnu::noinline]] inline bool all_finite(const BfloatPair* pairs, Index stride,
                                                    Index count, Index columns) {
  constexpr Index W = kLanes<float>;
  // Adding one to an exponent's last bit carries out of an exponent of ones only, into the sign.
  const auto carries = [](auto bits) { return (bits & 0x7F807F80U) + 0x00800080U; };
  detail::PairBits found = {};
  std::uint32_t edge = 0;
  for (Index r = 0; r < count; ++r, pairs += stride) {
    Index c = 0;
    for (; c + W <= columns; c += W) found |= carries(detail::load_pairs(pairs + c));
    for (; c < columns; ++c) edge |= carries(pairs[c].bits);
  }
  for (Index lane = 0; lane < W; ++lane) edge |= found[lane];
  return (edge & 0x80008000U) == 0;
}

// Replaces numbers that are not finite by 0.
[[gnu::noinline]] inline void clear_non_finite(BfloatPair* pairs, Index stride, Index count,
                                               Index columns) {
  for (Index r = 0; r < count; ++r, pairs += stride)
    for (Index c = 0; c < columns; ++c) {
      if ((pairs[c].bits & 0x7F80U) == 0x7F80U) pairs[c].bits &= 0xFFFF0000U;
      if ((pairs[c].bits & 0x7F800000U) == 0x7F800000U) pairs[c].bits &= 0x0000FFFFU;
    }
}

}  // namespace HEED_ABI
}  // namespace heed
