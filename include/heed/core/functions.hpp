// SPDX-License-Identifier: Apache-2.0
#pragma once

// More words of formulas, beside those of core/scalar.hpp and for the same scalars:
//
//   sin, cos, erf, expm1, log1p           as in <cmath>
//   softplus(x) = log(1 + e^x)            without overflow
//   pow(x, y)                             one of both may be a plain number
//   minimum(a, b)                         as maximum
//
// Each is written down once: plain numbers use <cmath>, values with derivatives use the slope in the line below. Packs have
// theirs in simd/functions.hpp. Another scalar joins with overloads that take a trailing Lookup.
//
// Accuracy  plain numbers: that of <cmath>; softplus 3 ulp. Slopes: that of the functions in their formulas; the slope of
//           erf at most x^2 + 4 ulp, since the rounding of x^2 grows in the exponential.
// Complex   f(a + ib) = f(a) + i b f'(a): the complex step, exact up to terms of b^2, which a step
//           of 1e-30 makes 0. These are not the functions of complex analysis.
// Bounds    the slope of pow(x, y) in x is 0 where y is 0, and that in y is 0 where x is 0 and y is not negative:
//           the limits of the slopes nearby, no NaN. A negative x has no slope in y: NaN.

#include <heed/core/scalar.hpp>

#include <cmath>
#include <concepts>
#include <type_traits>
#include <utility>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// A value with derivatives: Dual, LaneDual and Var; and a complex number of the complex step.
template <class S>
concept Chained = requires(const S& x) {
  x.chain(x.value, x.value);
};
template <class S>
concept ComplexStep = requires(const S& x) {
  { S(x.real(), x.imag()) } -> std::same_as<S>;
};
template <class S>
concept Differentiated = Chained<S> || ComplexStep<S>;

// x without the derivatives that S adds to it.
template <Differentiated S>
[[nodiscard, gnu::always_inline]] inline auto inner(const S& x) {
  if constexpr (Chained<S>)
    return x.value;
  else
    return x.real();
}

// f(x) from f's value and slope at inner(x).
template <Differentiated S, class V>
[[nodiscard, gnu::always_inline]] inline S outer(const S& x, const V& value, const V& slope) {
  if constexpr (Chained<S>)
    return x.chain(value, slope);
  else
    return S(value, slope * x.imag());
}

}  // namespace detail

namespace math {

template <class S>
[[nodiscard, gnu::always_inline]] inline S minimum(const S& a, const std::type_identity_t<S>& b) {
  const auto va = value_of(a), vb = value_of(b);
  return select((vb < va) | (vb != vb), b, a);
}

template <class S>
[[nodiscard]] S cos(const S& x);

// cos is the slope of sin
template <class S>
[[nodiscard, gnu::always_inline]] inline S sin(const S& x) {
  if constexpr (std::floating_point<S>) {
    return std::sin(x);
  } else if constexpr (detail::Differentiated<S>) {
    const auto v = detail::inner(x);
    return detail::outer(x, sin(v), cos(v));
  } else {
    return sin(x, Lookup{});
  }
}

// -sin
template <class S>
[[nodiscard, gnu::always_inline]] inline S cos(const S& x) {
  if constexpr (std::floating_point<S>) {
    return std::cos(x);
  } else if constexpr (detail::Differentiated<S>) {
    const auto v = detail::inner(x);
    return detail::outer(x, cos(v), decltype(v)(-sin(v)));
  } else {
    return cos(x, Lookup{});
  }
}

// 2 / sqrt(pi) e^(-x^2)
template <class S>
[[nodiscard, gnu::always_inline]] inline S erf(const S& x) {
  if constexpr (std::floating_point<S>) {
    return std::erf(x);
  } else if constexpr (detail::Differentiated<S>) {
    using V = decltype(detail::inner(x));
    const V v = detail::inner(x), bell = exp(V(-(v * v)));
    return detail::outer(x, erf(v), V(constant<V>(1.12837916709551257385L) * bell));
  } else {
    return erf(x, Lookup{});
  }
}

// e^x
template <class S>
[[nodiscard, gnu::always_inline]] inline S expm1(const S& x) {
  if constexpr (std::floating_point<S>) {
    return std::expm1(x);
  } else if constexpr (detail::Differentiated<S>) {
    const auto v = detail::inner(x);
    return detail::outer(x, expm1(v), exp(v));
  } else {
    return expm1(x, Lookup{});
  }
}

// 1 / (1 + x)
template <class S>
[[nodiscard, gnu::always_inline]] inline S log1p(const S& x) {
  if constexpr (std::floating_point<S>) {
    return std::log1p(x);
  } else if constexpr (detail::Differentiated<S>) {
    using V = decltype(detail::inner(x));
    const V v = detail::inner(x);
    return detail::outer(x, log1p(v), V(constant<V>(1) / (constant<V>(1) + v)));
  } else {
    return log1p(x, Lookup{});
  }
}

// sigmoid
template <class S>
[[nodiscard, gnu::always_inline]] inline S softplus(const S& x) {
  if constexpr (std::floating_point<S>) {
    return std::log1p(std::exp(-std::abs(x))) + maximum(x, S(0));
  } else if constexpr (detail::Differentiated<S>) {
    const auto v = detail::inner(x);
    return detail::outer(x, softplus(v), sigmoid(v));
  } else {
    return softplus(x, Lookup{});
  }
}

template <class A, class B>
[[nodiscard]] auto pow(const A& x, const B& y);

}  // namespace math

namespace detail {

// A plain number as a V, or inner(x).
template <class V, class X>
[[nodiscard, gnu::always_inline]] inline V inner_or_constant(const X& x) {
  if constexpr (std::is_arithmetic_v<X>)
    return math::constant<V>(x);
  else
    return inner(x);
}

// dx^y/dx = y x^(y-1), and 0 where y is 0: there x^y is 1 for every x.
template <class V>
[[nodiscard, gnu::always_inline]] inline V base_slope(const V& x, const V& y) {
  const V power = math::pow(x, V(y - math::constant<V>(1)));
  return math::select(math::value_of(y) == 0, math::constant<V>(0), V(y * power));
}

// dx^y/dy = x^y log(x), and 0 where x^y is 0, or jumps there: x = y = 0.
template <class V>
[[nodiscard, gnu::always_inline]] inline V exponent_slope(const V& x, const V& y, const V& power) {
  const V zero = math::constant<V>(0);
  const V slope = math::select(math::value_of(power) == 0, zero, V(power * math::log(x)));
  return math::select(math::value_of(y) == 0, math::select(math::value_of(x) == 0, zero, slope),
                      slope);
}

}  // namespace detail

namespace math {

template <class A, class B>
[[nodiscard, gnu::always_inline]] inline auto pow(const A& x, const B& y) {
  using S = std::conditional_t<std::is_arithmetic_v<A>, B, A>;
  static_assert(std::is_arithmetic_v<A> || std::is_arithmetic_v<B> || std::is_same_v<A, B>,
                "heed: math::pow(x, y) takes two numbers of one type, or a plain number as one of "
                "them");
  if constexpr (std::is_arithmetic_v<S>) {
    return std::pow(x, y);
  } else if constexpr (detail::Differentiated<S>) {
    using V = decltype(detail::inner(std::declval<S>()));
    const V vx = detail::inner_or_constant<V>(x), vy = detail::inner_or_constant<V>(y);
    const V power = pow(vx, vy);
    if constexpr (std::is_arithmetic_v<B>)
      return detail::outer(x, power, detail::base_slope(vx, vy));
    else if constexpr (std::is_arithmetic_v<A>)
      return detail::outer(y, power, detail::exponent_slope(vx, vy, power));
    else  // the sum of both changes; starting at -0 keeps a change of -0
      return S(detail::outer(x, power, detail::base_slope(vx, vy)) +
               detail::outer(y, constant<V>(-0.0), detail::exponent_slope(vx, vy, power)));
  } else if constexpr (std::is_arithmetic_v<A>) {
    return pow(constant<S>(x), y, Lookup{});
  } else if constexpr (std::is_arithmetic_v<B>) {
    return pow(x, constant<S>(y), Lookup{});
  } else {
    return pow(x, y, Lookup{});
  }
}

}  // namespace math
}  // namespace HEED_ABI
}  // namespace heed
