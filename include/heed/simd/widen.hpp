// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows of 16-bit numbers to rows of Real and back, a vector at a time: in integer arithmetic, which every processor
// has, or by the instructions that many have for half. Every processor with AVX2 has those, so that the classes of
// HEED_ISA need not tell them apart.

#include <heed/core/narrow.hpp>
#include <heed/simd/pack.hpp>

#include <algorithm>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#endif

namespace heed {
inline namespace HEED_ABI {
namespace detail {

typedef std::uint16_t NarrowBits __attribute__((vector_size(kRegisterBytes / 2)));
typedef std::uint16_t NarrowMemory
    __attribute__((vector_size(kRegisterBytes / 2), aligned(2), may_alias));

// A reference to NarrowMemory would lose what its type says of alignment.
inline void store_bits(NarrowBits bits, void* to) { *reinterpret_cast<NarrowMemory*>(to) = bits; }

// The numbers in 32 bits each. GCC makes four instructions of a plain conversion.
[[nodiscard]] inline Pack<float>::Bits unpacked(NarrowBits narrow) {
  using Bits = Pack<float>::Bits;
#if defined(__AVX512F__)
  return Bits(_mm512_maskz_cvtepu16_epi32(0xFFFF, (__m256i)narrow));
#elif defined(__AVX2__) && defined(__FMA__)
  return Bits(_mm256_cvtepu16_epi32((__m128i)narrow));
#else
  return __builtin_convertvector(narrow, Bits);
#endif
}

}  // namespace detail

// W numbers, as floats.
template <NarrowNumber Narrow>
[[nodiscard]] inline Pack<float> load_widened(const Narrow* from) {
  using P = Pack<float>;
  const detail::NarrowBits narrow = *reinterpret_cast<const detail::NarrowMemory*>(from);
#if defined(__F16C__) && defined(__AVX512F__)
  if constexpr (std::is_same_v<Narrow, half>)
    return P::Vector(_mm512_maskz_cvtph_ps(0xFFFF, (__m256i)narrow));
#elif defined(__F16C__) && defined(__AVX2__) && defined(__FMA__)
  if constexpr (std::is_same_v<Narrow, half>) return P::Vector(_mm256_cvtph_ps((__m128i)narrow));
#endif
  return P::Vector(Narrow::template widened<P::Vector>(detail::unpacked(narrow)));
}

// Rounds to the nearest numbers, ties to even.
template <NarrowNumber Narrow>
inline void store_narrowed(Pack<float> x, Narrow* to) {
  using P = Pack<float>;
#if defined(__F16C__) && defined(__AVX512F__)
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT;
  if constexpr (std::is_same_v<Narrow, half>)
    return detail::store_bits(
        detail::NarrowBits(_mm512_maskz_cvtps_ph(0xFFFF, (__m512)x.v, nearest)), to);
#elif defined(__F16C__) && defined(__AVX2__) && defined(__FMA__)
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT;
  if constexpr (std::is_same_v<Narrow, half>)
    return detail::store_bits(detail::NarrowBits(_mm256_cvtps_ph((__m256)x.v, nearest)), to);
#endif
  detail::store_bits(__builtin_convertvector(Narrow::template narrowed<P::Vector>(P::Bits(x.v)),
                                             detail::NarrowBits),
                     to);
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

}  // namespace HEED_ABI
}  // namespace heed
