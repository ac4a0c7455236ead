// SPDX-License-Identifier: Apache-2.0
#pragma once

// The gate of adaptive resonance and its short dynamics.
//
//   c' = c, or (c + 1)/2 for the centred gate
//   r_0 = 0,   r_{t+1} = g(y_t),   y_t = c' + beta r_t - rho
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
// The converged gate solves r = g(c' + beta r - rho) and differentiates the equation itself:
//
//   (dr/dc', dr/dalpha, dr/dbeta) = (alpha, y, alpha r) s / (1 - alpha beta s)
//
// Crossing  c' > rho: the gate's own input exceeds the vigilance, y > 0 at r = 0. For the static gate, of every
//           kind, that is r > 1/2; with feedback, positive or negative, it is not.
// Bounds    r in [0, 1]. Below slope bound 1 the fixed point is unique, the unrolled gate tends to
//           it, and 1 - alpha beta s > 0; the converged gate is for that case only.
// Accuracy  converged: a few ulp, divided by 1 - alpha beta s.
// Source    "Attention with Differentiable Adaptive Resonance", sections 2, 4, 5 and 11. Differs in
//           naming gamma of the piecewise-linear gate alpha; the converged gate is ours.
// Cost      one gate a step; converged: four or five Newton steps; some ten where a lane of a pack needs more.

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

// r with its derivatives; by vigilance it is -by_input.
template <class S>
struct GateDerivatives {
  S value{}, by_input{}, by_sharpness{}, by_feedback{};
};

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

  // Does an input c' cross the vigilance? What all reports of crossings count.
  template <class S>
  [[nodiscard]] static auto crosses(const S& input, const S& vigilance) {
    return input > vigilance;
  }

  // r at input c'.
  template <class S>
  [[nodiscard]] S value(const S& input, const GateScalars<S>& p) const {
    const S x = input - p.vigilance;
    if (converged) return fixed_point(x, p);
    S r = at(x, p.sharpness).value;
    for (int t = 1; t < iterations; ++t) r = at(S(x + p.feedback * r), p.sharpness).value;
    return r;
  }

  // Gate and fixed point of the logistic gate in a loop without branches, for exponents of any sign within
  // kFallingRange: fall = alpha (rho - c), total = alpha beta. A lane that a few steps do not bring home
  // takes the long way.
  template <class S>
  [[nodiscard, gnu::always_inline]] S logistic_fixed_point(const S& fall, const S& total,
                                                           const S& input,
                                                           const GateScalars<S>& p) const {
    const S zero = math::constant<S>(0), one = math::constant<S>(1);
    const auto step = [&](const S& r) {
      const S g = math::falling_sigmoid(S(fall - total * r));
      const S aim = r + (g - r) / (one - total * (g - g * g));
      return math::select(aim < zero, zero, math::select(aim > one, one, aim));
    };
    S r = math::falling_sigmoid(S(fall - total * math::constant<S>(0.5)));
    for (int i = 0; i < kBlindSteps<S>; ++i) r = step(r);
    const S near = step(r), root = step(near);
    // Newton's constant is about 1 / (2 margin): the root errs by no more than rounding / margin.
    const S margin = one - math::absolute(total) * math::constant<S>(0.25);
    const auto far = math::absolute(S(near - r)) > margin * math::constant<S>(kNear<S>);
    if (!any_of(far)) return root;
    return math::select(far, value(input, p), root);
  }

  // r and its derivatives at input c'.
  template <class S>
  [[nodiscard]] GateDerivatives<S> derivatives(const S& input, const GateScalars<S>& p) const {
    const S x = input - p.vigilance;
    if (converged) return at_fixed_point(x, p);
    const Point<S> first = at(x, p.sharpness);
    GateDerivatives<S> d{first.value, p.sharpness * first.slope, first.slope * x,
                         math::constant<S>(0)};
    for (int t = 1; t < iterations; ++t) advance(x, p, d);
    return d;
  }

 private:
  template <class S>
  struct Point {
    S value, slope;  // g and dg/d(alpha y)
  };

  template <class S>
  [[nodiscard]] Point<S> at(const S& y, const S& sharpness) const {
    const S z = sharpness * y;
    if (kind == GateKind::piecewise_linear) return clipped(S(z + math::constant<S>(0.5)));
    const bool doubled = kind == GateKind::tanh;  // (1 + tanh z)/2 is the logistic gate at 2 z
    const S g = math::sigmoid(doubled ? S(z + z) : z);
    const S slope = g - g * g;
    return {g, doubled ? S(slope + slope) : slope};
  }

  // The slope counts on the closed interval [0, 1].
  template <class S>
  [[nodiscard]] static Point<S> clipped(const S& z) {
    const S zero = math::constant<S>(0), one = math::constant<S>(1);
    const auto at = math::value_of(z);
    using Value = std::remove_cvref_t<decltype(at)>;
    const auto below = at<math::constant<Value>(0), above = at> math::constant<Value>(1);
    return {math::select(below, zero, math::select(above, one, z)),
            math::select(below | above, zero, one)};
  }

  // d from r_t to r_{t+1}, where x = c' - rho.
  template <class S>
  void advance(const S& x, const GateScalars<S>& p, GateDerivatives<S>& d) const {
    const S y = x + p.feedback * d.value;
    const Point<S> next = at(y, p.sharpness);
    const S outer = p.sharpness * next.slope, chain = outer * p.feedback;
    d.by_input = outer + chain * d.by_input;
    d.by_sharpness = next.slope * y + chain * d.by_sharpness;
    d.by_feedback = outer * d.value + chain * d.by_feedback;
    d.value = next.value;
  }

  template <class S>
  [[nodiscard]] GateDerivatives<S> at_fixed_point(const S& x, const GateScalars<S>& p) const {
    const S r = fixed_point(x, p), y = x + p.feedback * r;
    const S slope = at(y, p.sharpness).slope;
    const S outer = p.sharpness * slope;
    const S inverse = math::constant<S>(1) / (math::constant<S>(1) - outer * p.feedback);
    return {r, outer * inverse, slope * y * inverse, outer * r * inverse};
  }

  // The root of g(x + beta r) - r. Its plain value comes from Newton; one more step in S then makes
  // it exact to rounding and gives it the derivatives of the root.
  template <class S>
  [[nodiscard]] S fixed_point(const S& x, const GateScalars<S>& p) const {
    using Value = std::remove_cvref_t<decltype(math::value_of(x))>;
    const GateScalars<Value> plain{math::value_of(p.vigilance), math::value_of(p.sharpness),
                                   math::value_of(p.feedback)};
    const S r(newton(Value(math::value_of(x)), plain));
    const Point<S> g = at(S(x + p.feedback * r), p.sharpness);
    return r + (g.value - r) / (math::constant<S>(1) - p.sharpness * p.feedback * g.slope);
  }

  // Newton's method in a shrinking bracket, to a distance whose square is below rounding. A lane
  // that has arrived stays as it is: its bits do not depend on how long the others take.
  template <class V>
  [[nodiscard]] V newton(const V& x, const GateScalars<V>& p) const {
    const V zero = math::constant<V>(0), one = math::constant<V>(1);
    const V half = math::constant<V>(0.5);
    const V close = math::constant<V>(kClose<V>), total = p.sharpness * p.feedback;
    V low = zero, high = one, r = half;
    auto moving = r > low;  // every lane
    for (int step = 0; step < kMaxSteps && any_of(moving); ++step) {
      const Point<V> g = at(V(x + p.feedback * r), p.sharpness);
      const V gap = g.value - r;
      low = math::select(moving & (gap > zero), r, low);
      high = math::select(moving & (gap <= zero), r, high);
      const V aim = r + gap / (one - total * g.slope);
      const V next = math::select((aim >= low) & (aim <= high), aim, V((low + high) * half));
      const auto far = math::absolute(V(next - r)) > close;
      r = math::select(moving, next, r);
      moving = moving & far;
    }
    return r;
  }

  template <class V>
  static constexpr bool kSingle = std::is_same_v<V, float> || std::is_same_v<V, Pack<float>>;
  // epsilon^(2/3): the last step leaves about its square.
  template <class V>
  static constexpr double kClose = kSingle<V> ? 2.4e-5 : 3.7e-11;
  // epsilon^(1/4): two more steps leave about its fourth power.
  template <class V>
  static constexpr double kNear = kSingle<V> ? 2e-2 : 1e-4;
  template <class V>
  static constexpr int kBlindSteps = kSingle<V> ? 2 : 3;
  static constexpr int kMaxSteps = 64;  // bisection alone would reach rounding in 53

  template <class Mask>
  [[nodiscard]] static bool any_of(const Mask& mask) {
    if constexpr (std::is_same_v<Mask, bool>)
      return mask;
    else
      return any_lane(mask);
  }
};

}  // namespace HEED_ABI
}  // namespace heed
