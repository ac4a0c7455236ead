// SPDX-License-Identifier: Apache-2.0
#pragma once

// Activations, element by element.
//
//   gelu_erf   y = x Phi(x)                  y' = Phi(x) + x e^(-x^2/2) / sqrt(2 pi)
//   gelu_tanh  y = x s(z)                    y' = s(z) (1 + x z' (1 - s(z)))
//   silu       y = x s(x)                    y' = s(x) (1 + x (1 - s(x)))
//
// Symbols   Phi: distribution function of the standard normal. s(z) = 1 / (1 + e^-z).
//           z = 2 sqrt(2 / pi) (x + 0.044715 x^3), so that s(z) = (1 + tanh(z / 2)) / 2.
//
// The lower tail is Phi(-a) = e^(-a^2/2) r(a), a >= 0, with r a quotient of polynomials:
//
//   gelu_erf = max(x, 0) - a r(a) e^(-a^2/2),   a = |x|
//
// Accuracy  measured against quadruple precision; errors of y relative to max(1, |x|), of y' to 1:
//
//                  y, float  y, double  y', float  y', double
//       gelu_erf    8.0e-8    1.6e-16    1.3e-7     2.5e-16
//       the others  1.2e-7    2.2e-16    2.1e-7     3.7e-16
//
//           gelu_erf below 0 relative to y, with fused multiply-adds: 4.1e-7 and 1.1e-15.
// Bounds    y and y' are 0 below -13, -9.9, -86 (float) or -37.5, -21, -708 (double), where |y| is
//           below 4e-36; hence at -infinity. At +infinity y is infinite and y' is 1. NaN stays NaN.
// Source    r by a rational exchange algorithm (relative error, 60 digits): degrees 4 / 5 err by
//           4.7e-9 on [0, 13], degrees 9 / 10 by 4.9e-17 on [0, 38].

#include <heed/nn/elementwise.hpp>
#include <heed/simd/exp.hpp>
#include <heed/simd/instructions.hpp>

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

enum class Activation { gelu_erf, gelu_tanh, silu };

// The activation of that name; "gelu" is gelu_erf.
[[nodiscard]] inline Activation activation_named(const std::string& name) {
  if (name == "gelu") return Activation::gelu_erf;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "silu") return Activation::silu;
  fail("activation_named: name is \"", name, "\", it must be gelu, gelu_tanh or silu");
}

namespace detail {

// The lower tail r(a) = numerator / denominator, lowest degree first. All terms are positive: nothing cancels.
template <class Real>
struct NormalTail;
template <>
struct NormalTail<float> {
  static constexpr float end = 13.0F;  // y is -8e-38 there, still a normal number
  static constexpr float numerator[] = {0.5F, 0.434975876F, 0.180783765F, 0.0398087045F,
                                        0.00399434230F};
  static constexpr float denominator[] = {1.0F,         1.66783665F,   1.19230468F,
                                          0.463000149F, 0.0997932759F, 0.0100121812F};
};
template <>
struct NormalTail<double> {
  static constexpr double end = 37.5;
  static constexpr double numerator[] = {0.5,
                                         0.77423302759113418015,
                                         0.5931182930162165072,
                                         0.28867019863158678944,
                                         0.097402203498118972598,
                                         0.023531700015964432351,
                                         0.0040700568859680608596,
                                         0.00048763471621115682091,
                                         0.000037001652113669552256,
                                         1.3744692286998207644e-6};
  static constexpr double denominator[] = {1.0,
                                           2.3463506159851240995,
                                           2.5583535167575639521,
                                           1.7113973816309661559,
                                           0.78016417375276972532,
                                           0.25416772599757355554,
                                           0.060200653457124557026,
                                           0.010294869045268400601,
                                           0.0012257642509912302925,
                                           0.000092749387393870068772,
                                           3.4452834312805616454e-6};
};

template <class Real, std::size_t Count, std::size_t... Step>
[[nodiscard]] inline Pack<Real> horner(const Real (&c)[Count], Pack<Real> x,
                                       std::index_sequence<Step...>) {
  Pack<Real> sum = c[Count - 1];
  ((sum = mul_add(sum, x, Pack<Real>(c[Count - 2 - Step]))), ...);
  return sum;
}
template <class Real, std::size_t Count>
[[nodiscard]] inline Pack<Real> polynomial(const Real (&coefficients)[Count], Pack<Real> x) {
  return horner(coefficients, x, std::make_index_sequence<Count - 1>{});
}

// The formulas. Each has value(x), which is y, and slope(x), which is y'.
template <class Real>
struct GeluErf {
  using P = Pack<Real>;
  using Tail = NormalTail<Real>;

  [[nodiscard]] static P value(P x) {
    const P a = distance(x);
    const P lower = a * ratio(a) * bell(a);
    return select(x < P(-Tail::end), P(Real(0)), max(P(Real(0)), x) - lower);  // max keeps a NaN
  }
  [[nodiscard]] static P slope(P x) {
    const P a = distance(x);
    const P lower = bell(a) * mul_add(a, P(Real(-0.39894228040143267794)), ratio(a));  // y'(-a)
    const P mirrored = select(x > P(Real(0)), Real(1) - lower, lower);
    return select(x < P(-Tail::end), P(Real(0)), mirrored);
  }

 private:
  [[nodiscard]] static P distance(P x) { return min(P(Tail::end), max(x, -x)); }
  [[nodiscard]] static P ratio(P a) {
    return polynomial(Tail::numerator, a) / polynomial(Tail::denominator, a);
  }
  // e^(-a^2/2), corrected for the rounding of a^2, whose absolute error, up to 5e-6, would become
  // the relative error of the tail.
  [[nodiscard]] static P bell(P a) {
    const P square = a * a, lost = mul_add(a, a, -square);
    const P e = heed::detail::exp_inside(square * Real(-0.5));
    return mul_add(e * lost, P(Real(-0.5)), e);
  }
};

template <class Real>
struct Silu {
  using P = Pack<Real>;
  static constexpr Real end =
      sizeof(Real) == 4 ? Real(86) : Real(708);  // e^end is finite, and e^-end normal

  [[nodiscard]] static P value(P x) {
    const P e = heed::detail::exp_inside(-inside(x));
    return select(x < P(-end), P(Real(0)), x / (Real(1) + e));
  }
  [[nodiscard]] static P slope(P x) {
    const P z = inside(x), e = heed::detail::exp_inside(-z), s = Real(1) / (Real(1) + e);
    return select(x < P(-end), P(Real(0)), mul_add(s * z, e * s, s));
  }

 private:
  [[nodiscard]] static P inside(P x) { return min(P(end), max(P(-end), x)); }  // keeps a NaN
};

template <class Real>
struct GeluTanh {
  using P = Pack<Real>;
  static constexpr Real end = sizeof(Real) == 4 ? Real(9.9) : Real(21);  // z = 85 and 694
  static constexpr Real linear = Real(1.59576912160573071176), cubic = Real(0.07135481627260025);

  [[nodiscard]] static P value(P x) {
    const P e = heed::detail::exp_inside(-exponent(inside(x)));
    return select(x < P(-end), P(Real(0)), x / (Real(1) + e));
  }
  [[nodiscard]] static P slope(P x) {
    const P a = inside(x), e = heed::detail::exp_inside(-exponent(a)), s = Real(1) / (Real(1) + e);
    const P change = a * mul_add(a * a, P(3 * cubic), P(linear));  // x z'
    return select(x < P(-end), P(Real(0)), mul_add(s * change, e * s, s));
  }

 private:
  [[nodiscard]] static P inside(P x) { return min(P(end), max(P(-end), x)); }
  [[nodiscard]] static P exponent(P x) { return x * mul_add(x * x, P(cubic), P(linear)); }
};

// Calls run(formula) with the formula of the named activation.
template <class Real, class Run>
void with_formula(Activation activation, const Run& run) {
  switch (activation) {
    case Activation::gelu_erf: return run(GeluErf<Real>());
    case Activation::gelu_tanh: return run(GeluTanh<Real>());
    case Activation::silu: return run(Silu<Real>());
  }
  fail("activate: activation ", int(activation), " is not one of 0, 1, 2");
}

// Loads `count` numbers, at most a whole pack; the other lanes are 0.
template <class Real>
[[nodiscard]] inline Pack<Real> load_lanes(const Real* from, Index count) {
  if (count >= kLanes<Real>) return Pack<Real>::load(from);
  Real lanes[kLanes<Real>] = {};
  std::copy(from, from + count, lanes);
  return Pack<Real>::load(lanes);
}
template <class Real>
inline void store_lanes(Pack<Real> pack, Real* to, Index count) {
  if (count >= kLanes<Real>) return pack.store(to);
  Real lanes[kLanes<Real>];
  pack.store(lanes);
  std::copy(lanes, lanes + count, to);
}

// Calls body(row, first column, columns left) for every stretch of kLanes<Real> columns.
template <class Real, class Body>
void for_lanes(Context<Real>& c, Index rows, Index columns, const Body& body) {
  for_row_blocks(c, rows, columns, [&](Index first, Index last) {
    for (Index r = first; r < last; ++r)
      for (Index j = 0; j < columns; j += kLanes<Real>) body(r, j, columns - j);
  });
}

}  // namespace detail

// y = f(x), (tokens, width). y may be x.
template <class Real>
void activate(Context<Real>& c, Activation activation,
              const std::type_identity_t<MatrixView<const Real>>& x,
              const std::type_identity_t<MatrixView<Real>>& y) {
  require_extents(y, x.rows, x.columns, "activate", "y");
  detail::with_formula<Real>(activation, [&](auto formula) {
    detail::for_lanes(c, x.rows, x.columns, [&](Index r, Index j, Index count) {
      const Pack<Real> value = formula.value(detail::load_lanes(x.row(r) + j, count));
      detail::store_lanes(value, y.row(r) + j, count);
    });
  });
}

// dx = dy f'(x). dx may be dy.
template <class Real>
void activate_backward(Context<Real>& c, Activation activation,
                       const std::type_identity_t<MatrixView<const Real>>& x,
                       const std::type_identity_t<MatrixView<const Real>>& dy,
                       const std::type_identity_t<MatrixView<Real>>& dx) {
  require_extents(dy, x.rows, x.columns, "activate_backward", "dy");
  require_extents(dx, x.rows, x.columns, "activate_backward", "dx");
  detail::with_formula<Real>(activation, [&](auto formula) {
    detail::for_lanes(c, x.rows, x.columns, [&](Index r, Index j, Index count) {
      const Pack<Real> slope = formula.slope(detail::load_lanes(x.row(r) + j, count));
      detail::store_lanes(detail::load_lanes(dy.row(r) + j, count) * slope, dx.row(r) + j, count);
    });
  });
}

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
