// SPDX-License-Identifier: Apache-2.0
#pragma once

// One SIMD register of scalars as a value: arithmetic, comparison, select. Built on the vector
// extensions of GCC and clang; the widest registers that the compile flags allow. Formulas need no more than
// this; what computes with them includes instructions.hpp, whose intrinsics cost a compiler half a second.

#include <heed/core/config.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

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

// The larger lane; the second argument when either is a NaN.
template <class T>
[[nodiscard]] Pack<T> max(Pack<T> a, Pack<T> b);

// The smaller lane; the second argument when either is a NaN.
template <class T>
[[nodiscard]] Pack<T> min(Pack<T> a, Pack<T> b);

// a * b + c, rounded once where the hardware can. Spelled out, since whether a compiler fuses a plain
// expression depends on -std and -ffp-contract.
template <class Vector>
[[nodiscard]] Vector fused_multiply_add(Vector a, Vector b, Vector c);

template <class T>
[[nodiscard]] inline Pack<T> mul_add(Pack<T> a, Pack<T> b, Pack<T> c) {
  return fused_multiply_add(a.v, b.v, c.v);
}

// Lane by lane; NaN below 0.
template <class T>
[[nodiscard]] Pack<T> square_root(Pack<T> a);

// Is a lane of a comparison true?
template <class Mask>
[[nodiscard]] bool any_lane(Mask mask);

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
