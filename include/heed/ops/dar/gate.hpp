// SPDX-License-Identifier: Apache-2.0
#pragma once

// The gate of adaptive resonance and its short dynamics; ops/dar.hpp uses it.
//
//   c' = c, or (c + 1)/2 for the centred gate;   x = rho - c'
//   r_0 = 0,   r_{t+1} = g(y_t),   y_t = beta r_t - x
//
//   gate               g(y)                         s = dg/d(alpha y)      slope bound, |dg/dr_t|
//   logistic, centred  1/(1 + exp(-alpha y))        g (1 - g)              |alpha beta| / 4
//   tanh               (1 + tanh(alpha y))/2        2 g (1 - g)            |alpha beta| / 2
//   piecewise_linear   clip(alpha y + 1/2, 0, 1)    1 on [0, 1], else 0    |alpha beta|
//
// Derivatives of the unrolled gate are carried forward beside r, nothing is stored:
//
//   dr_{t+1}/dc'    = alpha s (1 + beta dr_t/dc')                          dr/drho = -dr/dc'
//   dr_{t+1}/dalpha = s (y_t + alpha beta dr_t/dalpha)
//   dr_{t+1}/dbeta  = alpha s (r_t + beta dr_t/dbeta)
//
// The converged gate solves r = g(beta r - x) and differentiates the equation itself:
//
//   (dr/dc', dr/dalpha, dr/dbeta) = (alpha, y, alpha r) s / (1 - alpha beta s)
//
// Crossing  c' > rho: the gate's own input exceeds the vigilance, y > 0 at r = 0. For the static
//           gate, of every kind, this is the same as r > 1/2; with feedback it is not.
// Bounds    r in [0, 1]. Below slope bound 1 the fixed point is unique, the unrolled gate tends to
//           it, and 1 - alpha beta s > 0; the converged gate is for that case only.
// Accuracy  converged: a few ulp, divided by 1 - alpha beta s.
// Source    "Attention with Differentiable Adaptive Resonance", sections 2, 4, 5 and 11. Differs in
//           naming gamma of the piecewise-linear gate alpha; the converged gate is ours.
// Cost      one gate a step; converged: two in float, three in double, one more where a lane of a pack needs it, and
//           some ten near slope bound 1.

#include <heed/core/scalar.hpp>
#include <heed/simd/exp.hpp>

#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

enum class GateKind { logistic, centred, tanh, piecewise_linear };

// Vigilance rho, sharpness alpha and feedback beta of one head.
template <class S>
struct GateScalars {
  S vigilance{}, sharpness{}, feedback{};
};

// r with its derivatives; dr/drho is -by_input.
template <class S>
struct GateDerivatives {
  S value{}, by_input{}, by_sharpness{}, by_feedback{};
};

namespace detail {

// g and s at one place.
template <class S>
struct GatePoint {
  S value, slope;
};

// A gate's curve: at(fall, alpha) is g and s at y = -fall, and value(fall, alpha) is g alone.
struct AnyCurve {
  GateKind kind;

  template <class S>
  [[nodiscard]] GatePoint<S> at(const S& fall, const S& sharpness) const {
    const S z = sharpness * -fall;
    if (kind == GateKind::piecewise_linear) return clipped(S(z + math::constant<S>(0.5)));
    const bool doubled = kind == GateKind::tanh;  // (1 + tanh z)/2 is the logistic gate at 2 z
    const S g = math::sigmoid(doubled ? S(z + z) : z);
    const S slope = g - g * g;
    return {g, doubled ? S(slope + slope) : slope};
  }
  template <class S>
  [[nodiscard]] S value(const S& fall, const S& sharpness) const {
    return at(fall, sharpness).value;
  }

 private:
  // The slope counts on the closed interval [0, 1].
  template <class S>
  [[nodiscard]] static GatePoint<S> clipped(const S& z) {
    const S zero = math::constant<S>(0), one = math::constant<S>(1);
    const auto at = math::value_of(z);
    using Value = std::remove_cvref_t<decltype(at)>;
    const auto below = at<math::constant<Value>(0), above = at> math::constant<Value>(1);
    return {math::select(below, zero, math::select(above, one, z)),
            math::select(below | above, zero, one)};
  }
};

// The static gate (iterations 0 and 1), and the unrolled one.
template <class Curve>
struct UnrolledGate {
  Curve curve;
  int iterations;

  template <class S>
  [[nodiscard, gnu::always_inline]] S value(const S& x, const GateScalars<S>& p) const {
    S r = curve.value(x, p.sharpness);
    for (int t = 1; t < iterations; ++t) r = curve.value(S(x - p.feedback * r), p.sharpness);
    return r;
  }

  template <class S>
  [[nodiscard, gnu::always_inline]] GateDerivatives<S> derivatives(const S& x,
                                                                   const GateScalars<S>& p) const {
    const GatePoint<S> first = curve.at(x, p.sharpness);
    GateDerivatives<S> d{first.value, p.sharpness * first.slope, -(first.slope * x),
                         math::constant<S>(0)};
    for (int t = 1; t < iterations; ++t) {
      const S fall = x - p.feedback * d.value;  // -y_t
      const GatePoint<S> next = curve.at(fall, p.sharpness);
      const S outer = p.sharpness * next.slope, chain = outer * p.feedback;
      d.by_input = outer + chain * d.by_input;
      d.by_sharpness = chain * d.by_sharpness - next.slope * fall;
      d.by_feedback = outer * d.value + chain * d.by_feedback;
      d.value = next.value;
    }
    return d;
  }
};

// The fixed point; root(x, p) finds it.
template <class Curve>
struct ConvergedGate {
  Curve curve;

  template <class S>
  [[nodiscard, gnu::always_inline]] S value(const S& x, const GateScalars<S>& p) const {
    return curve.root(x, p);
  }
  template <class S>
  [[nodiscard, gnu::always_inline]] GateDerivatives<S> derivatives(const S& x,
                                                                   const GateScalars<S>& p) const {
    const S r = curve.root(x, p), fall = x - p.feedback * r;
    const S slope = curve.slope_at_root(fall, r, p.sharpness), outer = p.sharpness * slope;
    const S inverse = math::constant<S>(1) / (math::constant<S>(1) - outer * p.feedback);
    return {r, outer * inverse, -(slope * fall * inverse), outer * r * inverse};
  }
};

template <class Mask>
[[nodiscard]] bool any_of(const Mask& mask) {
  if constexpr (std::is_same_v<Mask, bool>)
    return mask;
  else
    return any_lane(mask);
}

// A curve and its fixed point by Newton's method, for any kind of gate.
struct AnyRoot : AnyCurve {
  // The root of g(beta r - x) - r. The plain value comes from Newton; one more step in S then makes
  // it exact to rounding and gives it the derivatives of the root.
  template <class S>
  [[nodiscard]] S root(const S& x, const GateScalars<S>& p) const {
    using Value = std::remove_cvref_t<decltype(math::value_of(x))>;
    const GateScalars<Value> plain{math::value_of(p.vigilance), math::value_of(p.sharpness),
                                   math::value_of(p.feedback)};
    const S r(newton(Value(math::value_of(x)), plain));
    const GatePoint<S> g = at(S(x - p.feedback * r), p.sharpness);
    return r + (g.value - r) / (math::constant<S>(1) - p.sharpness * p.feedback * g.slope);
  }
  template <class S>
  [[nodiscard]] S slope_at_root(const S& fall, const S&, const S& sharpness) const {
    return at(fall, sharpness).slope;
  }

 private:
  // Newton's method in a shrinking bracket, to a distance whose square is below rounding. A lane that has arrived no longer
  // changes, so that its bits do not depend on how long other lanes take.
  template <class V>
  [[nodiscard]] V newton(const V& x, const GateScalars<V>& p) const {
    const V zero = math::constant<V>(0), one = math::constant<V>(1);
    const V one_half = math::constant<V>(0.5);
    const V close = math::constant<V>(kClose<V>), total = p.sharpness * p.feedback;
    V low = zero, high = one, r = one_half;
    auto moving = r > low;  // every lane
    for (int step = 0; step < kMaxSteps && any_of(moving); ++step) {
      const GatePoint<V> g = at(V(x - p.feedback * r), p.sharpness);
      const V gap = g.value - r;
      low = math::select(moving & (gap > zero), r, low);
      high = math::select(moving & (gap <= zero), r, high);
      const V aim = r + gap / (one - total * g.slope);
      const V next = math::select((aim >= low) & (aim <= high), aim, V((low + high) * one_half));
      const auto far = math::absolute(V(next - r)) > close;
      r = math::select(moving, next, r);
      moving = moving & far;
    }
    return r;
  }

  // epsilon^(2/3): the error after the last step is about the square of the step.
  template <class V>
  static constexpr double kClose =
      std::is_same_v<V, float> || std::is_same_v<V, Pack<float>> ? 2.4e-5 : 3.7e-11;
  static constexpr int kMaxSteps = 64;  // bisection alone would reach rounding in 53
};

}  // namespace detail

struct ResonanceGate {
  GateKind kind = GateKind::logistic;
  int iterations = 0;  // 0 and 1: static
  bool converged = false;

  // dc'/dc, and the factor of alpha beta in the slope bound.
  [[nodiscard]] double input_slope() const { return kind == GateKind::centred ? 0.5 : 1.0; }
  [[nodiscard]] double steepness() const {
    if (kind == GateKind::piecewise_linear) return 1.0;
    return kind == GateKind::tanh ? 0.5 : 0.25;
  }

  // c' of a cosine.
  template <class S>
  [[nodiscard]] S input(const S& cosine) const {
    if (kind != GateKind::centred) return cosine;
    return (cosine + math::constant<S>(1)) * math::constant<S>(0.5);
  }

  // True if an input c' exceeds the vigilance. All reports count crossings by this function.
  template <class S>
  [[nodiscard]] static auto crosses(const S& input, const S& vigilance) {
    return input > vigilance;
  }

  // r at input c'.
  template <class S>
  [[nodiscard]] S value(const S& input, const GateScalars<S>& p) const {
    return with_dynamics([&](const auto& gate) { return gate.value(S(p.vigilance - input), p); });
  }
  // r and its derivatives at input c'.
  template <class S>
  [[nodiscard]] GateDerivatives<S> derivatives(const S& input, const GateScalars<S>& p) const {
    return with_dynamics(
        [&](const auto& gate) { return gate.derivatives(S(p.vigilance - input), p); });
  }

 private:
  template <class F>
  [[nodiscard]] auto with_dynamics(F&& f) const {
    if (converged) return f(detail::ConvergedGate<detail::AnyRoot>{{{kind}}});
    return f(detail::UnrolledGate<detail::AnyCurve>{{kind}, iterations});
  }
};

}  // namespace HEED_ABI
}  // namespace heed
