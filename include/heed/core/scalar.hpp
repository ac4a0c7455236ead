// SPDX-License-Identifier: Apache-2.0
#pragma once

// The functions with which a formula is written once, as a template, and then run on every scalar S:
//
//   template <class S> S gate(const S& c) { return math::sigmoid(math::constant<S>(4) * c); }
//
// More such functions stand in core/functions.hpp: sin, cos, erf, pow, expm1, log1p, softplus, minimum.
//
// S is float, double, long double, std::complex (autodiff/complex_step.hpp), Dual (autodiff/dual.hpp,
// forward mode), Var (autodiff/tape.hpp, reverse mode) or Pack (simd/exp.hpp).
//
// A new scalar joins with overloads in heed::math that take a trailing Lookup:
//
//   Mine exp(const Mine& x, Lookup);   // no default argument
//
// math::exp(x) finds them where it is instantiated, so they may be declared after the formula; this
// holds for exp, log, sqrt, tanh, sigmoid, falling_sigmoid, value_of, select and dot_product. A vector_size
// type needs no more than exp, log, sqrt and tanh, or those of them that its formulas call.

#include <heed/core/config.hpp>

#include <cmath>
#include <concepts>
#include <type_traits>
#include <utility>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// Calls f(n) for n = 0 ... Count - 1, each n a constant of its own type.
template <class F, int... n>
[[gnu::always_inline]] inline void call_with(F&& f, std::integer_sequence<int, n...>) {
  (f(std::integral_constant<int, n>{}), ...);
}
template <int Count, class F>
[[gnu::always_inline]] inline void for_directions(F&& f) {
  call_with(f, std::make_integer_sequence<int, Count>{});
}

}  // namespace detail

namespace math {

// A trailing argument of this type makes the compiler look for overloads in heed::math, whatever the other arguments are.
struct Lookup {};

// A GCC or clang vector: `float __attribute__((vector_size(64)))`.
template <class S>
concept VectorExtension =
    !std::is_class_v<S> && !std::is_pointer_v<S> && !std::is_array_v<S> && requires(const S& x) {
  x[0];
};

// The number c as an S, in every lane of a pack and with derivative 0.
template <class S, class C>
requires std::is_arithmetic_v<C>
[[nodiscard]] constexpr S constant(C c) {
  if constexpr (VectorExtension<S>) {
    using Lane = std::remove_cvref_t<decltype(S{}[0])>;
    return S{} + static_cast<Lane>(c);
  } else if constexpr (requires { typename S::value_type; }) {
    return S(static_cast<typename S::value_type>(c));
  } else {
    return static_cast<S>(c);
  }
}

// The plain real part: x itself, real(x), or the value without its derivatives.
template <class S>
[[nodiscard]] constexpr auto value_of(const S& x) {
  if constexpr (requires { value_of(x, Lookup{}); })
    return value_of(x, Lookup{});
  else
    return x;
}

// mask ? a : b. The side that is not taken does not affect the value or the derivative, even if it is NaN.
template <class Mask, class S>
[[nodiscard]] constexpr S select(const Mask& mask, const S& a, const std::type_identity_t<S>& b) {
  if constexpr (requires { select(mask, a, b, Lookup{}); })
    return select(mask, a, b, Lookup{});
  else
    return mask ? a : b;
}

// The larger argument; a when they are equal; a NaN if either is one.
template <class S>
[[nodiscard]] constexpr S maximum(const S& a, const std::type_identity_t<S>& b) {
  const auto va = value_of(a), vb = value_of(b);
  return select((va < vb) | (vb != vb), b, a);
}

// x or -x, whichever is not negative; at 0 it is x, so the derivative there is 1.
template <class S>
[[nodiscard]] constexpr S absolute(const S& x) {
  const auto value = value_of(x);
  return select(value < decltype(value){}, S(-x), x);
}

template <std::floating_point Real>
[[nodiscard]] Real exp(Real x) {
  return std::exp(x);
}
template <class S>
requires requires(const S& x) { exp(x, Lookup{}); }
[[nodiscard]] auto exp(const S& x) { return exp(x, Lookup{}); }

// Natural logarithm. Derivative 1/x; +inf at 0.
template <std::floating_point Real>
[[nodiscard]] Real log(Real x) {
  return std::log(x);
}
template <class S>
requires requires(const S& x) { log(x, Lookup{}); }
[[nodiscard]] auto log(const S& x) { return log(x, Lookup{}); }

// Derivative 1 / (2 sqrt(x)): +inf at 0, which an outer factor 0 turns into NaN. A formula that may
// meet 0, such as a norm, selects around it. The complex step at 0 is large, but finite.
template <std::floating_point Real>
[[nodiscard]] Real sqrt(Real x) {
  return std::sqrt(x);
}
template <class S>
requires requires(const S& x) { sqrt(x, Lookup{}); }
[[nodiscard]] auto sqrt(const S& x) { return sqrt(x, Lookup{}); }

template <std::floating_point Real>
[[nodiscard]] Real tanh(Real x) {
  return std::tanh(x);
}
template <class S>
requires requires(const S& x) { tanh(x, Lookup{}); }
[[nodiscard]] auto tanh(const S& x) { return tanh(x, Lookup{}); }

// d tanh/dx = 4e / (1+e)^2 with e = exp(-2|x|): unlike 1 - tanh^2 it keeps its digits at large |x|.
template <class S>
[[nodiscard]] S tanh_slope(const S& x) {
  const S e = exp(S(constant<S>(-2) * absolute(x)));
  const S d = constant<S>(1) + e;
  return constant<S>(4) * e / (d * d);
}

// d sigmoid/dx = e / (1+e)^2 with e = exp(-|x|).
template <class S>
[[nodiscard]] S sigmoid_slope(const S& x) {
  const S e = exp(S(-absolute(x)));
  const S d = constant<S>(1) + e;
  return e / (d * d);
}

// 1 / (1 + exp(-x)), written with exp(-|x|): no overflow, and the left tail keeps its digits.
template <class S>
[[nodiscard]] S sigmoid(const S& x) {
  if constexpr (requires { sigmoid(x, Lookup{}); }) {
    return sigmoid(x, Lookup{});
  } else {
    const auto value = value_of(x);
    const S e = exp(S(-absolute(x)));
    const S d = constant<S>(1) + e;
    return select(value < decltype(value){}, S(e / d), S(constant<S>(1) / d));
  }
}

// exp(x), and sigmoid(-x), for callers that know |x| <= kFallingRange (simd/exp.hpp), where a pack needs no guard against
// overflow.
template <class S>
[[nodiscard]] S bounded_exp(const S& x) {
  if constexpr (requires { bounded_exp(x, Lookup{}); })
    return bounded_exp(x, Lookup{});
  else
    return exp(x);
}
template <class S>
[[nodiscard]] S falling_sigmoid(const S& x) {
  if constexpr (requires { falling_sigmoid(x, Lookup{}); })
    return falling_sigmoid(x, Lookup{});
  else
    return sigmoid(S(-x));
}

// sum of a(i) * b(i) for i = 0 ... n-1, in this order; 0 when n is 0. On Var it is a single node.
template <class A, class B>
[[nodiscard]] auto dot_product(Index n, const A& a, const B& b) {
  using S = std::remove_cvref_t<decltype(a(Index(0)) * b(Index(0)))>;
  if constexpr (requires { dot_product(std::type_identity<S>{}, n, a, b, Lookup{}); }) {
    return dot_product(std::type_identity<S>{}, n, a, b, Lookup{});
  } else {
    S sum = constant<S>(0);
    for (Index i = 0; i < n; ++i) sum += a(i) * b(i);
    return sum;
  }
}

}  // namespace math
}  // namespace HEED_ABI
}  // namespace heed
