// SPDX-License-Identifier: Apache-2.0
#pragma once

// The functions of core/functions.hpp for every lane of a pack.
//
//   log1p    1 + x = 2^k (1 + f), 1 + f in [sqrt(1/2), sqrt(2)), plus the rounding error of 1 + x
//            in f: k log(2) + 2 atanh(s),  s = f / (2 + f),  2 atanh(s) = 2 s + s^3 r(s^2)
//   expm1    2^n (r + r^2 e(r)) + (2^n - 1),  x = n log(2) + r
//   softplus max(x, 0) + log1p(e^-|x|)
//   sin, cos n = round(2 x / pi),  r = x - n pi / 2 in three parts of pi / 2;  polynomials in r^2
//   erf      |x| < 1: x + x p(x^2);  else 1 - e^l(|x| - 1),  l(v) = log(erfc(1 + v))
//   pow      2^(y log2(x)), the logarithm in two numbers, of 48 (float) or 106 (double) bits together
//
// Accuracy  largest error, where an ulp is that of the exact result:
//           log1p 1.6 ulp, expm1 2.5 ulp, softplus 3 ulp, sin and cos 2 ulp, erf 2 ulp, pow 2.5 ulp.
//           With or without FMA; tests/simd/functions_test.cpp holds them to it.
// Bounds    sin and cos of |x| > 100,000, pow of negative, subnormal and infinite bases, and results that are no normal
//           number: computed lane by lane with <cmath>, hence right, and slow.
//           expm1 is infinity above 87.33 (float) or 708.39 (double), as exp is. softplus is 0 below -87.33 or -708.39.
//           Special values are those of <cmath>: NaN, infinities, the sign of 0. Lanes do not influence each other. The
//           width of registers changes no bit, but for erf, softplus and pow of float: the exponential of exp.hpp adds its
//           terms in another order in registers of 64 bytes.
// Source    minimax coefficients found by Lawson iteration in quadruple precision (relative error).

#include <heed/core/functions.hpp>
#include <heed/simd/log.hpp>
#include <heed/simd/pack.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Real>
struct FunctionConstants;

template <>
struct FunctionConstants<float> {
  static constexpr float expm1[] = {0.5F,           0.166666657F,   0.0416663587F,
                                    0.00833338965F, 0.00139406684F, 0.000198458845F};
  static constexpr float atanh[] = {0.199999988F, 0.14285937F, 0.110925004F, 0.0973404422F};
  static constexpr float sine[] = {-0.166666552F, 0.008332178F, -0.000195172863F};
  static constexpr float cosine[] = {0.0416666456F, -0.00138873677F, 2.44384701e-05F};
  static constexpr float erf[] = {0.128379166F,   -0.37612626F,     0.112835854F,   -0.026853811F,
                                  0.00518832542F, -0.000801017683F, 7.85381344e-05F};
  static constexpr float log_erfc[] = {-1.84960556F,   -2.6389668F,    -0.843117654F,
                                       -0.0415033586F, 0.00989522971F, -0.00182921533F,
                                       0.000186335834F};
  static constexpr float erf_is_one = 4.0F;  // erf rounds to 1 from here on
  // In two numbers: 1/3 and 2 / log(2).
  static constexpr float third[] = {0.333333343F, -9.93410776e-09F};
  static constexpr float two_log2e[] = {2.88539004F, 3.85192607e-08F};
  static constexpr float split = 4097.0F;  // 2^12 + 1
};

template <>
struct FunctionConstants<double> {
  static constexpr double expm1[] = {0.5,
                                     0.16666666666666677,
                                     0.041666666666666512,
                                     0.008333333333321662,
                                     0.0013888888888961999,
                                     0.00019841269886056281,
                                     2.4801587173516635e-05,
                                     2.7557244270353788e-06,
                                     2.7557401635793943e-07,
                                     2.5109019147701697e-08,
                                     2.0875686790871052e-09};
  static constexpr double atanh[] = {
      0.1999999999999999,   0.14285714285722567,  0.11111111108765473,  0.09090909435513983,
      0.076922784104118555, 0.066681596925537906, 0.058373890727796272, 0.059946758404360742};
  static constexpr double sine[] = {-0.16666666666666632,    0.0083333333333224357,
                                    -0.0001984126982982567,  2.7557313697985864e-06,
                                    -2.5050759049509575e-08, 1.5896849140083398e-10};
  static constexpr double cosine[] = {0.041666666666666602,   -0.0013888888888874144,
                                      2.4801587289495672e-05, -2.7557314356448223e-07,
                                      2.0875723855686476e-09, -1.135967891810005e-11};
  static constexpr double erf[] = {
      0.12837916709551256,     -0.37612638903183521,    0.11283791670944177,
      -0.026866170643110605,   0.005223977606113683,    -0.00085483259291619339,
      0.00012055293574054776,  -1.4924712272926641e-05, 1.6447131465030083e-06,
      -1.6206314529685237e-07, 1.3710989456160802e-08,  -7.7794944479128403e-10};
  static constexpr double log_erfc[] = {
      -1.8496055099332482,     -2.6389675142347775,     -0.84310725635933581,
      -0.041561098026582935,   0.010033825194206487,    -0.0019779013055087682,
      0.00023731677859702841,  2.6295430873587235e-05,  -2.7197328112861524e-05,
      9.6692026522779661e-06,  -2.1298417127633101e-06, 2.0332738797833397e-07,
      5.877878491537456e-08,   -3.3676721686706926e-08, 8.5930552494709467e-09,
      -1.3319038741687709e-09, 1.2063570047200974e-10,  -4.9251568004303013e-12};
  static constexpr double erf_is_one = 6.0;
  static constexpr double third[] = {0.33333333333333331, 1.8503717077085941e-17};
  static constexpr double two_log2e[] = {2.8853900817779268, 4.0710547481862066e-17};
  static constexpr double split = 134217729.0;  // 2^27 + 1
};

// pi / 2. The first two parts have 37 bits, so that their products with n below 2^16 are exact.
inline constexpr double kHalfPi[] = {1.5707963267923333, 2.5633441515839558e-12,
                                     1.0562999066987428e-23};
inline constexpr double kReduced = 100000;  // sin and cos of larger numbers are left to <cmath>

template <class Real>
[[nodiscard]] inline Pack<Real> absolute(Pack<Real> x) {
  return math::select(x < Pack<Real>(Real(0)), -x, x, math::Lookup{});
}

// x, where it is so small that the functions with f(x) = x + O(x^2) round to x: they keep the sign of 0.
template <class Real>
[[nodiscard]] inline Pack<Real> unless_tiny(Pack<Real> x, Pack<Real> y) {
  const Pack<Real> tiny = std::numeric_limits<Real>::epsilon() / 2;
  return select((x < tiny) & (x > -tiny), x, y);
}

// A number as the sum of two, the second at most half an ulp of the first.
template <class Real>
struct TwoParts {
  Pack<Real> high, low;
};

// a + b without rounding; fast_sum where |a| >= |b|, or a is 0.
template <class Real>
[[nodiscard]] inline TwoParts<Real> exact_sum(Pack<Real> a, Pack<Real> b) {
  const Pack<Real> sum = a + b, from_b = sum - a;
  return {sum, (a - (sum - from_b)) + (b - from_b)};
}
template <class Real>
[[nodiscard]] inline TwoParts<Real> fast_sum(Pack<Real> a, Pack<Real> b) {
  const Pack<Real> sum = a + b;
  return {sum, b - (sum - a)};
}

// a * b without rounding.
template <class Real>
[[nodiscard]] inline TwoParts<Real> exact_product(Pack<Real> a, Pack<Real> b) {
  const Pack<Real> product = a * b;
  if constexpr (kFusesMultiplyAdd) {
    return {product, mul_add(a, b, -product)};
  } else {
    const Pack<Real> split = FunctionConstants<Real>::split;
    const auto halves = [&](Pack<Real> x) {
      const Pack<Real> scaled = split * x, high = scaled - (scaled - x);
      return TwoParts<Real>{high, x - high};
    };
    const auto [a1, a2] = halves(a);
    const auto [b1, b2] = halves(b);
    return {product, a2 * b2 - (((product - a1 * b1) - a2 * b1) - a1 * b2)};
  }
}

// a * b, rounded to two parts.
template <class Real>
[[nodiscard]] inline TwoParts<Real> product(TwoParts<Real> a, TwoParts<Real> b) {
  const TwoParts<Real> p = exact_product(a.high, b.high);
  return {p.high, p.low + mul_add(a.high, b.low, a.low * b.high)};
}

// log(1 + x) for -1 < x < infinity.
template <class Real>
[[nodiscard]] inline Pack<Real> log1p_inside(Pack<Real> x) {
  const Pack<Real> one = Real(1);
  const TwoParts<Real> sum = exact_sum(one, x);
  const Scientific<Real> u(sum.high);
  return log_of(u.exponent, (u.mantissa - one) + sum.low * u.power);
}

// x = n pi / 2 + r.high + r.low, |r| <= pi / 4 and a rounding; `rounded` = n + round_magic.
template <class Real>
struct Reduced {
  Pack<Real> rounded;
  TwoParts<Real> r;
  explicit Reduced(Pack<Real> x)
      : rounded(mul_add(x, Pack<Real>(Real(0.63661977236758134)),
                        Pack<Real>(FloatLayout<Real>::round_magic))) {
    const Pack<Real> n = integer_of(rounded);
    if constexpr (sizeof(Real) == 4) {
      typedef double Wide __attribute__((vector_size(2 * kRegisterBytes)));
      const Wide x2 = __builtin_convertvector(x.v, Wide), n2 = __builtin_convertvector(n.v, Wide);
      const Wide wide = (x2 - n2 * kHalfPi[0]) - n2 * kHalfPi[1];
      r.high = __builtin_convertvector(wide, typename Pack<Real>::Vector);
      r.low = Real(0);
    } else {
      // x - n part[0] is exact: both are within a factor of 2 of each other.
      const TwoParts<Real> two = exact_sum(x - n * kHalfPi[0], -(n * kHalfPi[1]));
      r = fast_sum(two.high, two.low - n * kHalfPi[2]);
    }
  }
};

// sin(x + quarters pi / 2) for |x| <= kReduced.
template <class Real>
[[nodiscard]] inline Pack<Real> shifted_sine(Pack<Real> x, unsigned quarters) {
  using Constants = FunctionConstants<Real>;
  using Bits = typename Pack<Real>::Bits;
  using Mask = typename Pack<Real>::Mask;
  using Word = std::remove_cvref_t<decltype(Bits{}[0])>;
  const Reduced<Real> reduced(x);
  const auto [r, low] = reduced.r;
  const Pack<Real> one = Real(1), z = r * r, half = Real(0.5) * z;
  // sin(r + low) = r + (r^3 s(z) + low (1 - z/2)),  cos(r + low) = 1 - z/2 + (z^2 c(z) - r low)
  const Pack<Real> sine = r + mul_add(r * z, polynomial(z, Constants::sine), low * (one - half));
  const Pack<Real> rough = one - half;
  const Pack<Real> cosine = rough + (((one - rough) - half) +
                                     mul_add(z * z, polynomial(z, Constants::cosine), -(r * low)));
  const Bits quadrant = Bits(reduced.rounded.v) - Word(FloatLayout<Real>::bias) + Word(quarters);
  const Pack<Real> size = select(Mask((quadrant & 1) != 0), cosine, sine);
  const Bits sign = (quadrant & 2) << int(8 * sizeof(Word) - 2);
  return typename Pack<Real>::Vector(Bits(size.v) ^ sign);
}

// y log2(x) for positive normal x.
template <class Real>
[[nodiscard]] inline TwoParts<Real> log2_power(Pack<Real> x, Pack<Real> y) {
  using Constants = FunctionConstants<Real>;
  using P = Pack<Real>;
  const auto two = [](const Real(&c)[2]) { return TwoParts<Real>{P(c[0]), P(c[1])}; };
  const Scientific<Real> parts(x);
  const P one = Real(1), f = parts.mantissa - one;
  // s = f / (2 + f) and the rounding error of the division
  const TwoParts<Real> divisor = exact_sum(one, parts.mantissa);
  const P quotient = f / divisor.high;
  const TwoParts<Real> back = exact_product(quotient, divisor.high);
  const P rest = ((f - back.high) - back.low) - quotient * divisor.low;
  const TwoParts<Real> s = fast_sum(quotient, P(rest / divisor.high));
  // log2(1 + f) = 2 / log(2) s (1 + z (1/3 + z a(z))),  z = s^2
  const TwoParts<Real> z = product(s, s);
  const TwoParts<Real> third = two(Constants::third);
  TwoParts<Real> sum = fast_sum(third.high, P(z.high * polynomial(z.high, Constants::atanh)));
  sum.low += third.low;
  const TwoParts<Real> tail = product(z, sum);
  sum = fast_sum(one, tail.high);
  sum.low += tail.low;
  const TwoParts<Real> fraction = product(product(s, sum), two(Constants::two_log2e));
  TwoParts<Real> log2 = exact_sum(parts.exponent, fraction.high);
  log2.low += fraction.low;
  const TwoParts<Real> power = exact_product(y, log2.high);
  return {power.high, mul_add(y, log2.low, power.low)};
}

}  // namespace detail

namespace math {

template <class Real>
[[nodiscard]] inline Pack<Real> log1p(Pack<Real> x, Lookup) {
  const Pack<Real> infinity = kInfinity<Real>, end = Real(-1);
  const Pack<Real> inside = heed::detail::unless_tiny(x, heed::detail::log1p_inside(x));
  const Pack<Real> nan = std::numeric_limits<Real>::quiet_NaN();
  const Pack<Real> low = select(x == end, -infinity, select(x < end, nan, inside));
  return select(x < infinity, low, x);
}

template <class Real>
[[nodiscard]] inline Pack<Real> expm1(Pack<Real> x, Lookup) {
  using L = heed::detail::FloatLayout<Real>;
  using P = Pack<Real>;
  const P top = (L::bias - Real(1)) * Real(kLn2);
  const P inside = min(top, max(-top, x));
  const P rounded = mul_add(inside, P(Real(kLog2e)), P(L::round_magic));
  const P n = heed::detail::integer_of(rounded);
  const P r = (inside - n * P(L::ln2_high)) - n * P(L::ln2_low);
  const P rest =
      mul_add(r * r, heed::detail::polynomial(r, heed::detail::FunctionConstants<Real>::expm1), r);
  const P power = typename P::Vector(typename P::Bits(rounded.v) << L::mantissa_bits);  // 2^n
  const P y = mul_add(power, rest, power - P(Real(1)));
  return select(x > top, P(kInfinity<Real>), heed::detail::unless_tiny(x, y));
}

template <class Real>
[[nodiscard]] inline Pack<Real> softplus(Pack<Real> x, Lookup) {
  const Pack<Real> e = exp(-heed::detail::absolute(x), Lookup{});
  return max(Pack<Real>(Real(0)), x) + heed::detail::log1p_inside(e);  // max keeps a NaN
}

template <class Real>
[[nodiscard]] inline Pack<Real> sin(Pack<Real> x, Lookup) {
  const Pack<Real> end = Real(heed::detail::kReduced);
  const Pack<Real> y = heed::detail::unless_tiny(x, heed::detail::shifted_sine(x, 0));
  const auto usual = (x <= end) & (x >= -end);
  return heed::detail::mended(y, ~usual, [&](int i) { return std::sin(x.v[i]); });
}

template <class Real>
[[nodiscard]] inline Pack<Real> cos(Pack<Real> x, Lookup) {
  const Pack<Real> end = Real(heed::detail::kReduced);
  const auto usual = (x <= end) & (x >= -end);
  return heed::detail::mended(heed::detail::shifted_sine(x, 1), ~usual,
                              [&](int i) { return std::cos(x.v[i]); });
}

template <class Real>
[[nodiscard]] inline Pack<Real> erf(Pack<Real> x, Lookup) {
  using Constants = heed::detail::FunctionConstants<Real>;
  using P = Pack<Real>;
  const P one = Real(1), a = heed::detail::absolute(x);
  const P near = mul_add(x, heed::detail::polynomial(P(x * x), Constants::erf), x);
  const P v = min(P(Constants::erf_is_one), a) - one;  // min keeps a NaN
  const P far = one - heed::detail::exp_inside(heed::detail::polynomial(v, Constants::log_erfc));
  return select(a < one, near, select(x < P(Real(0)), -far, far));
}

template <class Real>
[[nodiscard]] inline Pack<Real> pow(Pack<Real> x, Pack<Real> y, Lookup) {
  using L = heed::detail::FloatLayout<Real>;
  using P = Pack<Real>;
  const heed::detail::TwoParts<Real> power = heed::detail::log2_power(x, y);
  const P rounded = power.high + P(L::round_magic);
  const P f = (power.high - heed::detail::integer_of(rounded)) + power.low;
  const P result = heed::detail::scale_by_power(f, rounded);
  // Exponents up to 2^100 can be split in halves, and bases are normal numbers.
  const P zero = Real(0), large = Real(1.2676506002282294e30), end = L::bias - Real(1);
  const auto usual = (x >= P(std::numeric_limits<Real>::min())) & (x < P(kInfinity<Real>)) &
                     (power.high < end) & (power.high > -end) & (y < large) & (y > -large);
  // A base of 0, as from max(x, 0), is frequent; -0 is not.
  const auto nothing = typename P::Mask(typename P::Bits(x.v) == 0) & (y > zero);
  return heed::detail::mended(select(nothing, zero, result), ~(usual | nothing),
                              [&](int i) { return std::pow(x.v[i], y.v[i]); });
}

}  // namespace math
}  // namespace HEED_ABI
}  // namespace heed
