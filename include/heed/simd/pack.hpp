// SPDX-License-Identifier: Apache-2.0
#pragma once

// One SIMD register of scalars as a value, with arithmetic, comparison and select. It is built on the vector
// extensions of GCC and clang, and as wide as the compile flags allow. A formula is written with this header alone;
// code that calls max, min, mul_add, square_root or any_lane also includes instructions.hpp, which defines them and
// takes a compiler half a second to read.

#include <heed/core/config.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

namespace heed {
inline namespace HEED_ABI {

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

// True where mul_add() is one instruction, which rounds once.
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
inline constexpr bool kFusesMultiplyAdd = true;
#else
inline constexpr bool kFusesMultiplyAdd = false;
#endif

namespace detail {

// The compilers' vector types. They are spelled out per scalar, since GCC takes a vector type that depends on a
// template parameter for its scalar. A store of a vector can change scalars of its own type only, as far as the
// compiler knows, so that loops keep sizes and pointers in registers.
template <class Real>
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

// W lanes of Real.
template <class Real>
struct Pack {
  static_assert(std::is_same_v<Real, float> || std::is_same_v<Real, double>,
                "heed packs float or double");
  static constexpr int width = kRegisterBytes / int(sizeof(Real));
  using Vector = typename detail::Register<Real>::Vector;
  using Mask = typename detail::Register<Real>::Mask;
  using Bits = typename detail::Register<Real>::Bits;
  using Unaligned = typename detail::Register<Real>::Unaligned;

  Vector v;

  Pack() = default;
  Pack(Vector vector) : v(vector) {}
  // Every lane holds the same number.
  Pack(Real scalar) : v(scalar - Vector{}) {}
  template <class U>
  requires(std::is_arithmetic_v<U> && !std::is_same_v<U, Real>) Pack(U scalar)
      : Pack(Real(scalar)) {}

  [[nodiscard]] static Pack load(const Real* p) {
    return Vector(*reinterpret_cast<const Unaligned*>(p));
  }
  void store(Real* p) const { *reinterpret_cast<Unaligned*>(p) = v; }
  [[nodiscard]] static Pack iota() {
    Vector lanes;
    for (int i = 0; i < width; ++i) lanes[i] = Real(i);
    return lanes;
  }
  [[nodiscard]] Real lane(int i) const { return v[i]; }

  Pack& operator+=(Pack o) {
    v += o.v;
    return *this;
  }
  Pack& operator-=(Pack o) {
    v -= o.v;
    return *this;
  }
  Pack& operator*=(Pack o) {
    v *= o.v;
    return *this;
  }
  Pack& operator/=(Pack o) {
    v /= o.v;
    return *this;
  }
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

template <class Real>
inline constexpr int kLanes = Pack<Real>::width;

// n rounded up to whole vectors.
template <class Real>
[[nodiscard]] constexpr Index whole_vectors(Index n) {
  return (n + kLanes<Real> - 1) / kLanes<Real> * kLanes<Real>;
}

// A panel holds this many vectors of queries: 6 rows x 4 accumulators fill 32 registers, 6 x 2 fill 16.
inline constexpr int kPanelVectors = kRegisters == 32 ? 4 : 2;
template <class Real>
inline constexpr Index kPanelLanes = Index(kPanelVectors) * kLanes<Real>;

template <class Real>
inline constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

template <class P>
struct IsPack : std::false_type {};
template <class Real>
struct IsPack<Pack<Real>> : std::true_type {};

// mask ? a : b, lane by lane; a NaN in the branch not taken has no effect.
template <class Real>
[[nodiscard]] inline Pack<Real> select(typename Pack<Real>::Mask mask, Pack<Real> a, Pack<Real> b) {
  return typename Pack<Real>::Vector(mask ? a.v : b.v);
}

// x with 0 in the lanes of the mask, even where x is NaN.
template <class Real>
[[nodiscard]] inline Pack<Real> zero_where(typename Pack<Real>::Mask mask, Pack<Real> x) {
  return select(mask, Pack<Real>(Real(0)), x);
}

// 1 / x, and 0 where x is 0; NaN stays NaN.
template <class Real>
[[nodiscard]] inline Pack<Real> inverse_or_zero(Pack<Real> x) {
  return zero_where(x == Pack<Real>(Real(0)), Real(1) / x);
}

// The larger lane; the second argument when either is a NaN.
template <class Real>
[[nodiscard]] Pack<Real> max(Pack<Real> a, Pack<Real> b);

// The smaller lane; the second argument when either is a NaN.
template <class Real>
[[nodiscard]] Pack<Real> min(Pack<Real> a, Pack<Real> b);

// a * b + c, rounded once where the hardware can. Spelled out, since whether a compiler fuses a plain
// expression depends on -std and -ffp-contract.
template <class Vector>
[[nodiscard]] Vector fused_multiply_add(Vector a, Vector b, Vector c);

template <class Real>
[[nodiscard]] inline Pack<Real> mul_add(Pack<Real> a, Pack<Real> b, Pack<Real> c) {
  return fused_multiply_add(a.v, b.v, c.v);
}

// The square root of every lane, NaN for numbers below 0.
template <class Real>
[[nodiscard]] Pack<Real> square_root(Pack<Real> a);

// True if some lane of a comparison is true.
template <class Mask>
[[nodiscard]] bool any_lane(Mask mask);

// f of all lanes, taken in pairs in a fixed order: those of the halves, then those of the halves of the result, and so on.
template <int Half, class Real, class F, int... L>
[[nodiscard, gnu::always_inline]] inline Real fold_halves(Pack<Real> p, F&& f,
                                                          std::integer_sequence<int, L...> lanes) {
  if constexpr (Half == 0) return p.lane(0);
  const Pack<Real> other =
      typename Pack<Real>::Vector(__builtin_shufflevector(p.v, p.v, (L + Half) % kLanes<Real>...));
  return fold_halves<Half / 2>(f(p, other), f, lanes);
}
template <class Real, class F>
[[nodiscard, gnu::always_inline]] inline Real fold_lanes(Pack<Real> p, F&& f) {
  return fold_halves<kLanes<Real> / 2>(p, f, std::make_integer_sequence<int, kLanes<Real>>{});
}
template <class Real>
[[nodiscard]] inline Real sum_lanes(Pack<Real> p) {
  return fold_lanes(p, [](Pack<Real> a, Pack<Real> b) { return a + b; });
}
// The largest lane of a pack without NaN.
template <class Real>
[[nodiscard]] inline Real max_lanes(Pack<Real> p) {
  return fold_lanes(p, [](Pack<Real> a, Pack<Real> b) { return max(a, b); });
}

}  // namespace HEED_ABI
}  // namespace heed
