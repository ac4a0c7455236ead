// SPDX-License-Identifier: Apache-2.0
#pragma once

// Exponential, sigmoid and tanh of every lane of a pack.
//
//   2^x = 2^n 2^f,  n = round(x),  2^f = 1 + f q(f) on [-1/2, 1/2],  q of degree 5 (float) or 10 (double)
//   e^x = 2^(x log2(e))
//
// Accuracy  largest error, where an ulp is that of the exact result and eps that of 1 (2^-23 or 2^-52):
//           exp2_weight 1.8 ulp, exp 2 ulp, sigmoid 2.6 ulp, tanh 10 ulp and 1.6 eps,
//           falling_sigmoid 1 eps. With or without FMA; tests/simd/exp_test.cpp holds them to it.
// Bounds    exp2_weight(0) = 1 exactly; exactly 0 at and below -127 (float) or -1023 (double), hence at -infinity; between
//           that and -126 or -1022 it is off by less than the smallest normal number. exp is exactly 0 below -87.33 (float)
//           or -708.39 (double), and +infinity above 87.33 or 708.39. NaN stays NaN. Lanes do not influence each other.
// Source    minimax coefficients found by Lawson iteration in quadruple precision (relative error).

#include <heed/core/scalar.hpp>
#include <heed/simd/pack.hpp>

namespace heed {
inline namespace HEED_ABI {

inline constexpr double kLog2e = 1.4426950408889634074;
inline constexpr double kLn2 = 0.69314718055994530942;

namespace detail {

template <class Real>
struct FloatLayout;
template <>
struct FloatLayout<float> {
  static constexpr int mantissa_bits = 23;
  static constexpr float bias = 127.0F;
  // 1.5 * 2^23 + bias: adding it rounds to an integer n and leaves n + bias in the lowest bits.
  static constexpr float round_magic = 12583039.0F;
  static constexpr float log2e_tail = 1.92596303e-08F;  // log2(e) - float(log2(e))
  // ln(2) in two parts; the first has so few bits that its product with any exponent is exact.
  static constexpr float ln2_high = 0.693359375F, ln2_low = -2.12194440e-4F;
};
template <>
struct FloatLayout<double> {
  static constexpr int mantissa_bits = 52;
  static constexpr double bias = 1023.0;
  static constexpr double round_magic = 6755399441056767.0;  // 1.5 * 2^52 + bias
  static constexpr double log2e_tail = 2.0355273740931033e-17;
  static constexpr double ln2_high = 0.693145751953125, ln2_low = 1.42860682030941723212e-6;
};

// n, the integer nearest to x, from rounded = x + round_magic. A compiler that may reassociate would fold (x + c) - c to x.
// config.hpp refuses the flags that let g++ do so; clang has no macro for these flags, so this function forbids it.
template <class Real>
[[nodiscard, gnu::always_inline]] inline Pack<Real> integer_of(Pack<Real> rounded) {
#if defined(__clang__)
#pragma clang fp reassociate(off)
#endif
  const typename Pack<Real>::Vector magic = Pack<Real>(FloatLayout<Real>::round_magic).v;
  return typename Pack<Real>::Vector(rounded.v - magic);
}

// q(f) of 2^f = 1 + f q(f), |f| <= 1/2.
[[nodiscard]] inline Pack<float> exp2_tail(Pack<float> f) {
  using P = Pack<float>;
  if constexpr (kRegisterBytes < 64) {
    // Estrin's scheme takes one product more than Horner's and half the time from first to last. That time
    // is the limit where registers are narrow: few lanes are in flight while each result waits for the one before.
    const P f2 = f * f;
    const P low = mul_add(f, P(0.240226477F), P(0.693147182F));
    const P middle = mul_add(f, P(0.00961843692F), P(0.0555033237F));
    const P high = mul_add(f, P(0.00015353362F), P(0.00133988739F));
    return mul_add(f2, mul_add(f2, high, middle), low);
  }
  P q = mul_add(f, P(0.00015353362F), P(0.00133988739F));
  q = mul_add(q, f, P(0.00961843692F));
  q = mul_add(q, f, P(0.0555033237F));
  q = mul_add(q, f, P(0.240226477F));
  return mul_add(q, f, P(0.693147182F));
}

[[nodiscard]] inline Pack<double> exp2_tail(Pack<double> f) {
  // Estrin's scheme takes half of the time of Horner's from first to last at this degree.
  using P = Pack<double>;
  const P f2 = f * f, f4 = f2 * f2, f8 = f4 * f4;
  const P p0 = mul_add(f, P(0.2402265069591013), P(0.69314718055994529));
  const P p1 = mul_add(f, P(0.0096181291075941207), P(0.055504108664820084));
  const P p2 = mul_add(f, P(0.00015403530457112132), P(0.0013333558146774638));
  const P p3 = mul_add(f, P(1.3215435282322036e-06), P(1.525273349311431e-05));
  const P p4 = mul_add(f, P(7.0737832414659509e-09), P(1.0178199576383995e-07));
  const P high = mul_add(f2, P(4.4347707387361369e-10), p4);
  return mul_add(f8, high, mul_add(f4, mul_add(f2, p3, p2), mul_add(f2, p1, p0)));
}

// 2^n (1 + f q(f)) where `rounded` = n + round_magic, so that its lowest bits, n + bias, are the exponent of 2^n. It
// multiplies instead of adding to the exponent's bits, so that a NaN stays NaN whatever its payload.
template <class Real>
[[nodiscard]] inline Pack<Real> scale_by_power(Pack<Real> f, Pack<Real> rounded) {
  using Bits = typename Pack<Real>::Bits;
  const Pack<Real> p = mul_add(exp2_tail(f), f, Pack<Real>(Real(1)));
  const Bits power = Bits(rounded.v) << FloatLayout<Real>::mantissa_bits;
  return p * Pack<Real>(typename Pack<Real>::Vector(power));
}

// f of e^x = 2^(n + f): x log2(e) - n, without the rounding of x log2(e), which a large x makes large.
template <class Real>
[[nodiscard]] inline Pack<Real> exp_fraction(Pack<Real> x, Pack<Real> n) {
  using L = FloatLayout<Real>;
  if constexpr (kFusesMultiplyAdd) {
    const Pack<Real> rough = mul_add(x, Pack<Real>(Real(kLog2e)), -n);
    return mul_add(x, Pack<Real>(L::log2e_tail), rough);
  } else {
    return ((x - n * Pack<Real>(L::ln2_high)) - n * Pack<Real>(L::ln2_low)) *
           Pack<Real>(Real(kLog2e));
  }
}

// e^x where e^x neither overflows nor underflows.
template <class Real>
[[nodiscard]] inline Pack<Real> exp_inside(Pack<Real> x) {
  const Pack<Real> log2e = Real(kLog2e);
  const Pack<Real> rounded = mul_add(x, log2e, Pack<Real>(FloatLayout<Real>::round_magic));
  return scale_by_power(exp_fraction(x, integer_of(rounded)), rounded);
}

}  // namespace detail

// 2^x for x <= 0, as in the weights of a softmax, and for positive x up to 100.
template <class Real>
[[nodiscard]] inline Pack<Real> exp2_weight(Pack<Real> x) {
  using L = detail::FloatLayout<Real>;
  x = max(Pack<Real>(-L::bias), x);  // max returns its second operand if either is NaN
  const Pack<Real> rounded = x + L::round_magic;
  return detail::scale_by_power(x - detail::integer_of(rounded), rounded);
}

namespace math {

template <class Real>
[[nodiscard]] inline Pack<Real> exp(Pack<Real> x, Lookup) {
  using L = detail::FloatLayout<Real>;
  const Pack<Real> top = (L::bias - Real(1)) * Real(kLn2),
                   bottom = -(L::bias - Real(1)) * Real(kLn2);
  const Pack<Real> inside = min(top, max(bottom, x));
  const Pack<Real> y = detail::exp_inside(inside);
  const Pack<Real> low = select(x < bottom, Pack<Real>(Real(0)), y);
  return select(x > top, Pack<Real>(kInfinity<Real>), low);
}

// 1 / (1 + e^-x). Below -86.6 (float) or -707.7 (double) it keeps the value that it has there, 2.4e-38 or 4.5e-308.
template <class Real>
[[nodiscard]] inline Pack<Real> sigmoid(Pack<Real> x, Lookup) {
  using L = detail::FloatLayout<Real>;
  const Real limit = (L::bias - Real(2)) * Real(kLn2);
  const Pack<Real> inside = min(Pack<Real>(limit), max(Pack<Real>(-limit), x));  // keeps a NaN
  return Real(1) / (Real(1) + detail::exp_inside(-inside));
}

// Arguments of bounded_exp() and falling_sigmoid() have at most this absolute value, so that e^x neither overflows nor
// vanishes.
template <class Real>
inline constexpr double kFallingRange = sizeof(Real) == 4 ? 80.0 : 700.0;

// e^x without guards against overflow, and with log2(e) in one part: the relative error grows with |x|.
template <class Real>
[[nodiscard]] inline Pack<Real> bounded_exp(Pack<Real> x, Lookup) {
  const Pack<Real> y = x * Real(kLog2e), rounded = y + heed::detail::FloatLayout<Real>::round_magic;
  const Pack<Real> f = y - heed::detail::integer_of(rounded);
  return heed::detail::scale_by_power(f, rounded);
}

// 1 / (1 + e^x). What the error of e^x does to it is e^x / (1 + e^x)^2, which falls faster than that grows.
template <class Real>
[[nodiscard]] inline Pack<Real> falling_sigmoid(Pack<Real> x, Lookup) {
  return Real(1) / (Real(1) + bounded_exp(x, Lookup{}));
}

// (e^2x - 1) / (e^2x + 1). For |x| below 0.17 the difference e^2x - 1, which would cancel, is computed as f q(f).
template <class Real>
[[nodiscard]] inline Pack<Real> tanh(Pack<Real> x, Lookup) {
  const Pack<Real> f = x * Real(2 * kLog2e);
  const auto small = (f < Pack<Real>(Real(0.5))) & (f > Pack<Real>(Real(-0.5)));
  const Pack<Real> inside = select(small, f, Pack<Real>(Real(0)));
  const Pack<Real> difference = detail::exp2_tail(inside) * inside;
  const Pack<Real> near = difference / (difference + Real(2));
  return select(small, near, Real(2) * sigmoid(x + x, Lookup{}) - Real(1));
}

template <class Real>
[[nodiscard]] inline Pack<Real> sqrt(Pack<Real> x, Lookup) {
  return square_root(x);
}

// Four sums run side by side, so that an addition need not wait for the one before.
template <class Real, class A, class B>
[[nodiscard]] Pack<Real> dot_product(std::type_identity<Pack<Real>>, Index n, const A& a,
                                     const B& b, Lookup) {
  constexpr Index chains = 4;
  Pack<Real> sums[chains] = {Real(0), Real(0), Real(0), Real(0)};
  Index i = 0;
  for (; i + chains <= n; i += chains)
#pragma GCC unroll 4
    for (Index k = 0; k < chains; ++k) sums[k] = mul_add(a(i + k), b(i + k), sums[k]);
  for (; i < n; ++i) sums[0] = mul_add(a(i), b(i), sums[0]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

template <class Real>
[[nodiscard]] inline Pack<Real> select(typename Pack<Real>::Mask mask, Pack<Real> a, Pack<Real> b,
                                       Lookup) {
  return heed::select(mask, a, b);
}

}  // namespace math

}  // namespace HEED_ABI
}  // namespace heed
