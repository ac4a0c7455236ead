// SPDX-License-Identifier: Apache-2.0
#pragma once

// Converts rows of 16-bit numbers to rows of Real and back, and rows of int8 numbers with their scale to rows of Real.
// Conversion goes a vector at a time, in integer arithmetic, or by the processor's instructions for half. Every processor
// with AVX2 and every 64-bit Arm has these, so that HEED_ISA has no class of its own for them.

#include <heed/core/scaled_view.hpp>
#include <heed/simd/pack.hpp>

#include <algorithm>
#include <cstring>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace heed {
inline namespace HEED_ABI {
namespace detail {

typedef std::uint16_t NarrowBits __attribute__((vector_size(kRegisterBytes / 2)));
typedef std::uint16_t NarrowMemory
    __attribute__((vector_size(kRegisterBytes / 2), aligned(2), may_alias));

typedef std::int8_t Bytes __attribute__((vector_size(kRegisterBytes / 4)));

// Takes a pointer: a reference to NarrowMemory would lose its alignment.
inline void store_bits(NarrowBits bits, void* to) { *reinterpret_cast<NarrowMemory*>(to) = bits; }

// The numbers in 32 bits each.
[[nodiscard]] inline Pack<float>::Bits unpacked(NarrowBits narrow);
[[nodiscard]] inline Pack<float>::Mask unpacked(const std::int8_t* from);

// W numbers to floats, and floats to the nearest W numbers: by integer arithmetic, unless the
// processor has instructions for it.
template <NarrowNumber Narrow>
struct Conversion {
  using P = Pack<float>;
  [[nodiscard]] static P widened(NarrowBits narrow) {
    return P::Vector(Narrow::template widened<P::Vector>(unpacked(narrow)));
  }
  [[nodiscard]] static NarrowBits narrowed(P x) {
    return __builtin_convertvector(Narrow::template narrowed<P::Vector>(P::Bits(x.v)), NarrowBits);
  }
};

// GCC makes four instructions of a plain conversion to 32 bits.
#if defined(__AVX512F__)
[[nodiscard]] inline Pack<float>::Bits unpacked(NarrowBits narrow) {
  return Pack<float>::Bits(_mm512_maskz_cvtepu16_epi32(0xFFFF, __m256i(narrow)));
}
[[nodiscard]] inline Pack<float>::Mask unpacked(const std::int8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return Pack<float>::Mask(_mm512_maskz_cvtepi8_epi32(0xFFFF, bytes));
}
template <>
struct Conversion<half> {
  [[nodiscard]] static Pack<float> widened(NarrowBits narrow) {
    return _mm512_maskz_cvtph_ps(0xFFFF, __m256i(narrow));
  }
  [[nodiscard]] static NarrowBits narrowed(Pack<float> x) {
    return NarrowBits(_mm512_maskz_cvtps_ph(0xFFFF, x.v, _MM_FROUND_TO_NEAREST_INT));
  }
};
#elif defined(__AVX2__) && defined(__FMA__)
[[nodiscard]] inline Pack<float>::Bits unpacked(NarrowBits narrow) {
  return Pack<float>::Bits(_mm256_cvtepu16_epi32(__m128i(narrow)));
}
[[nodiscard]] inline Pack<float>::Mask unpacked(const std::int8_t* from) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return Pack<float>::Mask(_mm256_cvtepi8_epi32(bytes));
}
#if defined(__F16C__)
template <>
struct Conversion<half> {
  [[nodiscard]] static Pack<float> widened(NarrowBits narrow) {
    return _mm256_cvtph_ps(__m128i(narrow));
  }
  [[nodiscard]] static NarrowBits narrowed(Pack<float> x) {
    return NarrowBits(_mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
  }
};
#endif
#else
[[nodiscard]] inline Pack<float>::Bits unpacked(NarrowBits narrow) {
  return __builtin_convertvector(narrow, Pack<float>::Bits);
}
[[nodiscard]] inline Pack<float>::Mask unpacked(const std::int8_t* from) {
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Pack<float>::Mask);
}
#if defined(__aarch64__)
template <>
struct Conversion<half> {
  [[nodiscard]] static Pack<float> widened(NarrowBits narrow) {
    return Pack<float>::Vector(vcvt_f32_f16(float16x4_t(narrow)));
  }
  [[nodiscard]] static NarrowBits narrowed(Pack<float> x) {
    return NarrowBits(vcvt_f16_f32(float32x4_t(x.v)));
  }
};
#endif
#endif

}  // namespace detail

// W numbers, as floats.
template <NarrowNumber Narrow>
[[nodiscard]] inline Pack<float> load_widened(const Narrow* from) {
  return detail::Conversion<Narrow>::widened(*reinterpret_cast<const detail::NarrowMemory*>(from));
}

[[nodiscard]] inline Pack<float> load_widened(const std::int8_t* from) {
  return __builtin_convertvector(detail::unpacked(from), Pack<float>::Vector);
}

// Rounds to the nearest numbers, ties to even.
template <NarrowNumber Narrow>
inline void store_narrowed(Pack<float> x, Narrow* to) {
  detail::store_bits(detail::Conversion<Narrow>::narrowed(x), to);
}

// to[i] = from[i]
template <NarrowNumber Narrow, class Real>
void widen(const Narrow* from, Index count, Real* to) {
  const Index whole = std::is_same_v<Real, float> ? count / kLanes<float> * kLanes<float> : 0;
  if constexpr (std::is_same_v<Real, float>)
    for (Index i = 0; i < whole; i += kLanes<float>) load_widened(from + i).store(to + i);
  for (Index i = whole; i < count; ++i) to[i] = Real(float(from[i]));
}

// to[i] = from[i], rounded to the nearest; a double is rounded to float before.
template <NarrowNumber Narrow, class Real>
void narrow(const Real* from, Index count, Narrow* to) {
  const Index whole = std::is_same_v<Real, float> ? count / kLanes<float> * kLanes<float> : 0;
  if constexpr (std::is_same_v<Real, float>)
    for (Index i = 0; i < whole; i += kLanes<float>)
      store_narrowed(Pack<float>::load(from + i), to + i);
  for (Index i = whole; i < count; ++i) to[i] = Narrow(float(from[i]));
}

// to[i] = from[i], rounded to the nearest where To is the narrower type.
template <class From, class To>
void convert(const From* from, Index count, To* to) {
  if constexpr (std::is_same_v<From, To>)
    std::copy_n(from, count, to);
  else if constexpr (NarrowNumber<From> && NarrowNumber<To>)
    for (Index i = 0; i < count; ++i) to[i] = To(float(from[i]));
  else if constexpr (NarrowNumber<From>)
    widen(from, count, to);
  else
    narrow(from, count, to);
}

// to[c] = number c of the first row.
template <class Number, class Real>
void convert(const StoredRows<Number>& row, Index count, Real* to) {
  convert(row.data, count, to);
}
template <class Real>
void convert(const ScaledRows& row, Index count, Real* to) {
  const float scale = row.scales[0];
  Index c = 0;
  if constexpr (std::is_same_v<Real, float>)
    for (; c + kLanes<float> <= count; c += kLanes<float>)
      (load_widened(row.data + c) * Pack<float>(scale)).store(to + c);
  for (; c < count; ++c) to[c] = Real(scale * float(row.data[c]));
}

}  // namespace HEED_ABI
}  // namespace heed
