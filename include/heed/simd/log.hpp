// SPDX-License-Identifier: Apache-2.0
#pragma once

// The logarithm of every lane of a pack.
//
//   log      x = 2^k (1 + f), 1 + f in [sqrt(1/2), sqrt(2)):  k log(2) + 2 atanh(s),  s = f / (2 + f),
//            2 atanh(s) = 2 s + s^3 r(s^2)
//
// Accuracy  largest error 1 ulp; tests/simd/exp_test.cpp holds it to that.
// Bounds    0, infinities, NaN, negative and subnormal numbers: computed lane by lane with <cmath>.
// Source    minimax coefficients found by Lawson iteration in quadruple precision (relative error).

#include <heed/simd/exp.hpp>
#include <heed/simd/instructions.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Real>
struct LogConstants;
template <>
struct LogConstants<float> {
  static constexpr float log[] = {0.666667759F, 0.399775237F, 0.298722297F};
  static constexpr std::uint32_t sqrt_half = 0x3F3504F3;  // the bits of sqrt(1/2)
};
template <>
struct LogConstants<double> {
  static constexpr double log[] = {0.6666666666666734,  0.39999999999413727, 0.28571428742628685,
                                   0.22222198546217894, 0.18183565829628245, 0.15314009611046356,
                                   0.14796383498475588};
  static constexpr std::uint64_t sqrt_half = 0x3FE6A09E667F3BCD;
};

// c[0] + c[1] x + c[2] x^2 + ...: even and odd powers are summed apart, so that neither sum waits for the other.
template <class Real, std::size_t Size>
[[nodiscard]] inline Pack<Real> polynomial(Pack<Real> x, const Real (&c)[Size]) {
  constexpr int Count = Size;
  const Pack<Real> square = x * x;
  Pack<Real> sums[2] = {Pack<Real>(c[Count - 1]), Pack<Real>(c[Count - 2])};
#pragma GCC unroll 32
  for (int i = Count - 3; i >= 0; --i) {
    Pack<Real>& sum = sums[(Count - 1 - i) % 2];
    sum = mul_add(sum, square, Pack<Real>(c[i]));
  }
  constexpr int even = (Count - 1) % 2;  // power of the sum that ends with c[0]
  return mul_add(sums[1 - even], x, sums[even]);
}

// y with f(i) in each lane i of the mask.
template <class Real, class F>
[[nodiscard]] inline Pack<Real> mended(Pack<Real> y, typename Pack<Real>::Mask mask, const F& f) {
  if (any_lane(mask))
    for (int i = 0; i < kLanes<Real>; ++i)
      if (mask[i] != 0) y.v[i] = f(i);
  return y;
}

// A positive normal number as 2^exponent * mantissa, the mantissa in [sqrt(1/2), sqrt(2)); power is 2^-exponent.
template <class Real>
struct Scientific {
  Pack<Real> exponent, mantissa, power;
  explicit Scientific(Pack<Real> x) {
    using L = FloatLayout<Real>;
    using P = Pack<Real>;
    using Bits = typename P::Bits;
    using Word = std::remove_cvref_t<decltype(Bits{}[0])>;
    const Word bias = Word(L::bias), one = bias << L::mantissa_bits;
    const Bits bits = Bits(x.v);
    const Bits biased = (bits - LogConstants<Real>::sqrt_half + one) >> L::mantissa_bits;
    // A small integer in the lowest bits of 2^mantissa_bits is added to it.
    const P large = Real(Word(1) << L::mantissa_bits);
    exponent = P(typename P::Vector(biased | Bits(large.v))) - (large + L::bias);
    mantissa = typename P::Vector(bits - (biased << L::mantissa_bits) + one);
    power = typename P::Vector((2 * bias - biased) << L::mantissa_bits);
  }
};

// log(2^k (1 + f)), 1 + f in [sqrt(1/2), sqrt(2)].
template <class Real>
[[nodiscard]] inline Pack<Real> log_of(Pack<Real> k, Pack<Real> f) {
  using L = FloatLayout<Real>;
  const Pack<Real> s = f / (Real(2) + f), z = s * s, half = Real(0.5) * f * f;
  const Pack<Real> r = z * polynomial(z, LogConstants<Real>::log);
  // 2 s + s r = f - (f^2 / 2 - s (f^2 / 2 + r)): a small correction of f, which is exact.
  const Pack<Real> correction = half - mul_add(s, half + r, k * Pack<Real>(L::ln2_low));
  return k * Pack<Real>(L::ln2_high) - (correction - f);
}

}  // namespace detail

namespace math {

template <class Real>
[[nodiscard]] inline Pack<Real> log(Pack<Real> x, Lookup) {
  const heed::detail::Scientific<Real> u(x);
  const auto usual =
      (x >= Pack<Real>(std::numeric_limits<Real>::min())) & (x < Pack<Real>(kInfinity<Real>));
  return heed::detail::mended(heed::detail::log_of(u.exponent, u.mantissa - Pack<Real>(Real(1))),
                              ~usual, [&](int i) { return std::log(x.v[i]); });
}

}  // namespace math
}  // namespace HEED_ABI
}  // namespace heed
