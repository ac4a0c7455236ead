// SPDX-License-Identifier: Apache-2.0
#pragma once

// One SIMD register of scalars as a value: arithmetic, comparison, select. Built on the vector
// extensions of GCC and clang; the widest registers that the compile flags allow.

#include <heed/core/config.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#if defined(__FMA__)
#include <immintrin.h>
#endif

namespace heed::inline HEED_ABI {

#if defined(__AVX512F__)
inline constexpr int kRegisterBytes = 64;
inline constexpr int kRegisters = 32;
#elif defined(__AVX__)
inline constexpr int kRegisterBytes = 32;
inline constexpr int kRegisters = 16;
#elif defined(__aarch64__)
inline constexpr int kRegisterBytes = 16;
inline constexpr int kRegisters = 32;
#else
inline constexpr int kRegisterBytes = 16;
inline constexpr int kRegisters = 16;
#endif

namespace detail {

// The compilers' vector types; spelled per scalar since GCC mistakes a dependent one for its scalar. A
// vector aliases its own scalars and nothing else, so that loops keep sizes and pointers in registers.
template <class T>
struct Register;
template <>
struct Register<float> {
  typedef float Vector __attribute__((vector_size(kRegisterBytes)));
  typedef std::int32_t Mask __attribute__((vector_size(kRegisterBytes)));
  typedef std::uint32_t Bits __attribute__((vector_size(kRegisterBytes)));
  typedef float Unaligned __attribute__((vector_size(kRegisterBytes), aligned(4)));
};
template <>
struct Register<double> {
  typedef double Vector __attribute__((vector_size(kRegisterBytes)));
  typedef std::int64_t Mask __attribute__((vector_size(kRegisterBytes)));
  typedef std::uint64_t Bits __attribute__((vector_size(kRegisterBytes)));
  typedef double Unaligned __attribute__((vector_size(kRegisterBytes), aligned(8)));
};

}  // namespace detail

// W lanes of T.
template <class T>
struct Pack {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>, "heed packs float or double");
  static constexpr int width = kRegisterBytes / int(sizeof(T));
  using Vector = typename detail::Register<T>::Vector;
  using Mask = typename detail::Register<T>::Mask;
  using Bits = typename detail::Register<T>::Bits;
  using Unaligned = typename detail::Register<T>::Unaligned;

  Vector v;

  Pack() = default;
  Pack(Vector vector) : v(vector) {}
  // Every lane holds the same number.
  Pack(T scalar) : v(scalar - Vector{}) {}
  template <class U>
    requires(std::is_arithmetic_v<U> && !std::is_same_v<U, T>)
  Pack(U scalar) : Pack(T(scalar)) {}

  [[nodiscard]] static Pack load(const T* p) { return Vector(*reinterpret_cast<const Unaligned*>(p)); }
  void store(T* p) const { *reinterpret_cast<Unaligned*>(p) = v; }
  [[nodiscard]] static Pack iota() {
    Vector lanes;
    for (int i = 0; i < width; ++i) lanes[i] = T(i);
    return lanes;
  }
  [[nodiscard]] T lane(int i) const { return v[i]; }

  Pack& operator+=(Pack o) { v += o.v; return *this; }
  Pack& operator-=(Pack o) { v -= o.v; return *this; }
  Pack& operator*=(Pack o) { v *= o.v; return *this; }
  Pack& operator/=(Pack o) { v /= o.v; return *this; }
  friend Pack operator+(Pack a, Pack b) { return a.v + b.v; }
  friend Pack operator-(Pack a, Pack b) { return a.v - b.v; }
  friend Pack operator*(Pack a, Pack b) { return a.v * b.v; }
  friend Pack operator/(Pack a, Pack b) { return a.v / b.v; }
  friend Pack operator-(Pack a) { return -a.v; }
  friend Mask operator<(Pack a, Pack b) { return a.v < b.v; }
  friend Mask operator<=(Pack a, Pack b) { return a.v <= b.v; }
  friend Mask operator>(Pack a, Pack b) { return a.v > b.v; }
  friend Mask operator>=(Pack a, Pack b) { return a.v >= b.v; }
  friend Mask operator==(Pack a, Pack b) { return a.v == b.v; }
  friend Mask operator!=(Pack a, Pack b) { return a.v != b.v; }
};

template <class T>
inline constexpr int kLanes = Pack<T>::width;

// A panel holds this many vectors of queries: 6 rows x 4 accumulators fill 32 registers, 6 x 2 fill 16.
inline constexpr int kPanelVectors = kRegisters == 32 ? 4 : 2;
template <class T>
inline constexpr Index kPanelLanes = Index(kPanelVectors) * kLanes<T>;

template <class T>
inline constexpr T kInfinity = std::numeric_limits<T>::infinity();

template <class P>
struct IsPack : std::false_type {};
template <class T>
struct IsPack<Pack<T>> : std::true_type {};

// mask ? a : b, lane by lane; a NaN in the branch not taken has no effect.
template <class T>
[[nodiscard]] inline Pack<T> select(typename Pack<T>::Mask mask, Pack<T> a, Pack<T> b) {
  return typename Pack<T>::Vector(mask ? a.v : b.v);
}

namespace detail {

#if defined(__AVX512F__)
// GCC warns of undefined operands inside its own unmasked forms of max and min.
inline constexpr __mmask16 kAllLanes16 = 0xFFFF;
inline constexpr __mmask8 kAllLanes8 = 0xFF;
#endif

// a > b ? a : b and a < b ? a : b. One instruction each, which GCC does not find by itself.
template <class T>
[[nodiscard]] inline Pack<T> larger(Pack<T> a, Pack<T> b) {
  using V = typename Pack<T>::Vector;
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    return (V)_mm512_maskz_max_ps(kAllLanes16, (__m512)a.v, (__m512)b.v);
  else
    return (V)_mm512_maskz_max_pd(kAllLanes8, (__m512d)a.v, (__m512d)b.v);
#elif defined(__FMA__)
  if constexpr (sizeof(T) == 4)
    return (V)_mm256_max_ps((__m256)a.v, (__m256)b.v);
  else
    return (V)_mm256_max_pd((__m256d)a.v, (__m256d)b.v);
#else
  return V(a.v > b.v ? a.v : b.v);
#endif
}
template <class T>
[[nodiscard]] inline Pack<T> smaller(Pack<T> a, Pack<T> b) {
  using V = typename Pack<T>::Vector;
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    return (V)_mm512_maskz_min_ps(kAllLanes16, (__m512)a.v, (__m512)b.v);
  else
    return (V)_mm512_maskz_min_pd(kAllLanes8, (__m512d)a.v, (__m512d)b.v);
#elif defined(__FMA__)
  if constexpr (sizeof(T) == 4)
    return (V)_mm256_min_ps((__m256)a.v, (__m256)b.v);
  else
    return (V)_mm256_min_pd((__m256d)a.v, (__m256d)b.v);
#else
  return V(a.v < b.v ? a.v : b.v);
#endif
}

}  // namespace detail

// The larger lane; the second argument when either is a NaN.
template <class T>
[[nodiscard]] inline Pack<T> max(Pack<T> a, Pack<T> b) {
  return detail::larger(a, b);
}
// The smaller lane; the second argument when either is a NaN.
template <class T>
[[nodiscard]] inline Pack<T> min(Pack<T> a, Pack<T> b) {
  return detail::smaller(a, b);
}

// a * b + c, rounded once where the hardware can. Spelled out, since whether a compiler fuses a plain
// expression depends on -std and -ffp-contract.
template <class Vector>
[[nodiscard]] inline Vector fused_multiply_add(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(a[0]) == 4)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  else
    return (Vector)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
  if constexpr (sizeof(a[0]) == 4)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  else
    return (Vector)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  return a * b + c;
#endif
}

template <class T>
[[nodiscard]] inline Pack<T> mul_add(Pack<T> a, Pack<T> b, Pack<T> c) {
  return fused_multiply_add(a.v, b.v, c.v);
}

// Lane by lane; NaN below 0.
template <class T>
[[nodiscard]] inline Pack<T> square_root(Pack<T> a) {
  using V = typename Pack<T>::Vector;
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    return (V)_mm512_maskz_sqrt_ps(detail::kAllLanes16, (__m512)a.v);
  else
    return (V)_mm512_maskz_sqrt_pd(detail::kAllLanes8, (__m512d)a.v);
#elif defined(__FMA__)
  if constexpr (sizeof(T) == 4)
    return (V)_mm256_sqrt_ps((__m256)a.v);
  else
    return (V)_mm256_sqrt_pd((__m256d)a.v);
#else
  V root{};
  for (int i = 0; i < kLanes<T>; ++i) root[i] = std::sqrt(a.v[i]);
  return root;
#endif
}

// Is a lane of a comparison true?
template <class Mask>
[[nodiscard]] inline bool any_lane(Mask mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__FMA__)
  return _mm256_testz_si256((__m256i)mask, (__m256i)mask) == 0;
#else
  bool any = false;
  for (unsigned i = 0; i < sizeof(mask) / sizeof(mask[0]); ++i) any |= mask[i] != 0;
  return any;
#endif
}

// Lanes added pairwise in a fixed order.
template <class T>
[[nodiscard]] inline T sum_lanes(Pack<T> p) {
  T lanes[kLanes<T>];
  p.store(lanes);
  for (int half = kLanes<T> / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

}  // namespace heed::inline HEED_ABI
