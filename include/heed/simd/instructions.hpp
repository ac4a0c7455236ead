// SPDX-License-Identifier: Apache-2.0
#pragma once

// The operations that pack.hpp declares, by intrinsics of the instruction set: compilers do not
// turn plain vector code into these single instructions.

#include <heed/simd/pack.hpp>

#include <cmath>

#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace heed {
inline namespace HEED_ABI {

#if defined(__AVX512F__)
namespace detail {

// GCC warns of undefined operands inside its own unmasked forms of max and min.
inline constexpr __mmask16 kAllLanes16 = 0xFFFF;
inline constexpr __mmask8 kAllLanes8 = 0xFF;

}  // namespace detail
#endif

// a > b ? a : b and a < b ? a : b: one instruction of x86. The one of Arm differs where a lane is NaN, so that two take its
// place there.
template <class Real>
[[nodiscard]] inline Pack<Real> max(Pack<Real> a, Pack<Real> b) {
  using V = typename Pack<Real>::Vector;
#if defined(__AVX512F__)
  if constexpr (sizeof(Real) == 4)
    return V(_mm512_maskz_max_ps(detail::kAllLanes16, __m512(a.v), __m512(b.v)));
  else
    return V(_mm512_maskz_max_pd(detail::kAllLanes8, __m512d(a.v), __m512d(b.v)));
#elif defined(__FMA__)
  if constexpr (sizeof(Real) == 4)
    return V(_mm256_max_ps(__m256(a.v), __m256(b.v)));
  else
    return V(_mm256_max_pd(__m256d(a.v), __m256d(b.v)));
#else
  return V(a.v > b.v ? a.v : b.v);
#endif
}
template <class Real>
[[nodiscard]] inline Pack<Real> min(Pack<Real> a, Pack<Real> b) {
  using V = typename Pack<Real>::Vector;
#if defined(__AVX512F__)
  if constexpr (sizeof(Real) == 4)
    return V(_mm512_maskz_min_ps(detail::kAllLanes16, __m512(a.v), __m512(b.v)));
  else
    return V(_mm512_maskz_min_pd(detail::kAllLanes8, __m512d(a.v), __m512d(b.v)));
#elif defined(__FMA__)
  if constexpr (sizeof(Real) == 4)
    return V(_mm256_min_ps(__m256(a.v), __m256(b.v)));
  else
    return V(_mm256_min_pd(__m256d(a.v), __m256d(b.v)));
#else
  return V(a.v < b.v ? a.v : b.v);
#endif
}

template <class Vector>
[[nodiscard]] inline Vector fused_multiply_add(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(a[0]) == 4)
    return Vector(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
  else
    return Vector(_mm512_fmadd_pd(__m512d(a), __m512d(b), __m512d(c)));
#elif defined(__FMA__)
  if constexpr (sizeof(a[0]) == 4)
    return Vector(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
  else
    return Vector(_mm256_fmadd_pd(__m256d(a), __m256d(b), __m256d(c)));
#elif defined(__aarch64__)
  if constexpr (sizeof(a[0]) == 4)
    return Vector(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b)));
  else
    return Vector(vfmaq_f64(float64x2_t(c), float64x2_t(a), float64x2_t(b)));
#else
  return a * b + c;
#endif
}

template <class Real>
[[nodiscard]] inline Pack<Real> square_root(Pack<Real> a) {
  using V = typename Pack<Real>::Vector;
#if defined(__AVX512F__)
  if constexpr (sizeof(Real) == 4)
    return V(_mm512_maskz_sqrt_ps(detail::kAllLanes16, __m512(a.v)));
  else
    return V(_mm512_maskz_sqrt_pd(detail::kAllLanes8, __m512d(a.v)));
#elif defined(__FMA__)
  if constexpr (sizeof(Real) == 4)
    return V(_mm256_sqrt_ps(__m256(a.v)));
  else
    return V(_mm256_sqrt_pd(__m256d(a.v)));
#elif defined(__aarch64__)
  if constexpr (sizeof(Real) == 4)
    return V(vsqrtq_f32(float32x4_t(a.v)));
  else
    return V(vsqrtq_f64(float64x2_t(a.v)));
#else
  V root{};
  for (int i = 0; i < kLanes<Real>; ++i) root[i] = std::sqrt(a.v[i]);
  return root;
#endif
}

template <class Mask>
[[nodiscard]] inline bool any_lane(Mask mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(__m512i(mask), __m512i(mask)) != 0;
#elif defined(__FMA__)
  return _mm256_testz_si256(__m256i(mask), __m256i(mask)) == 0;
#elif defined(__aarch64__)
  return vmaxvq_u32(uint32x4_t(mask)) != 0;
#else
  bool any = false;
  for (unsigned i = 0; i < sizeof(mask) / sizeof(mask[0]); ++i) any |= mask[i] != 0;
  return any;
#endif
}

}  // namespace HEED_ABI
}  // namespace heed
