// SPDX-License-Identifier: Apache-2.0
#pragma once

// Fast forms of DAR's score, for the usual options: logistic gate, strength that is not adaptive, cosine at full width.
// They compute the formulas of ops/dar.hpp without branches: |c| <= 1 bounds every exponent, and fast_range() says whether
// the bound is small enough for a sigmoid without guards. Every form equals the formula (dar_forms_test).
//
//   StaticForm              sums three numbers over a query's keys, from which its five gradients follow:
//                           dlambda = sum g r    drho = -sum e    dalpha = (sum e c - rho sum e) / alpha
//                           dn = sum e c / n     with e = dL/dc
//   FastForm<Gate>          the unrolled and the converged gate

#include <heed/ops/dar/gate.hpp>
#include <heed/plug/score.hpp>
#include <heed/simd/row_norm.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// c = x n m of a pair whose dot product is x, or that of the projected rows.
template <class S>
[[nodiscard, gnu::always_inline]] inline S dar_cosine(const S& x, const Pair<S, 2, 2>& pair) {
  return x * pair.query[0] * pair.key[0];
}
// dx = e n m,  dn = e x m,  dm = e x n, with e = dL/dc
template <class S>
[[gnu::always_inline]] inline void dar_cosine_vjp(const S& x, const Pair<S, 2, 2>& pair, const S& e,
                                                  S& dx, Pair<S, 2, 2>& d) {
  const S en = e * pair.query[0], em = e * pair.key[0];
  dx = en * pair.key[0];
  d.query[0] = em * x;
  d.key[0] = en * x;
}

// With g = dL/dr: drho = -g dr/dc', dalpha = g dr/dalpha, dbeta = g dr/dbeta. Returns dL/dc'.
template <class S>
[[gnu::always_inline]] inline S dar_gate_vjp(const GateDerivatives<S>& r, const S& g, auto& dp) {
  const S dinput = g * r.by_input;
  dp[1] -= dinput;
  dp[2] += g * r.by_sharpness;
  dp[3] += g * r.by_feedback;
  return dinput;
}

// The logistic gate; the size of its exponents stays within kFallingRange.
struct FastCurve {
  template <class S>
  [[nodiscard, gnu::always_inline]] S value(const S& fall, const S& sharpness) const {
    return math::falling_sigmoid(S(sharpness * fall));
  }
  template <class S>
  [[nodiscard, gnu::always_inline]] GatePoint<S> at(const S& fall, const S& sharpness) const {
    const S g = value(fall, sharpness);
    return {g, g - g * g};
  }
};

// Finds the fixed point of FastCurve by a few of Halley's steps, of third order. With t = alpha beta and v = t/2 - alpha x the root
// is 1 - w for v > 0 and w else, where 0 < w <= 1/2 solves
//
//   w = e / (1 + e),   e = exp(t w - b),   b = |v| + t/2
//
// The start (4 - t) / (4 |v| + 8 - 2 t) is right at v = 0, with its slope, and far away. A step, with F = e / (1 + e) - w:
//
//   q = 1 + e    u = q F = e - w q    W = -q^2 F' = q^2 - t e    q^3 F'' = t^2 e (1 - e)
//   w <- w - 2 F F' / (2 F'^2 - F F'') = w + 2 u W q / max(2 W^2 - u t^2 e (1 - e), W^2), cut to [0, 1/2]
//
// The maximum keeps the divisor positive. A lane that is not near enough to the root after them uses AnyRoot.
struct FastRoot : FastCurve {
  template <class S>
  [[nodiscard, gnu::always_inline]] S root(const S& x, const GateScalars<S>& p) const {
    const S zero = math::constant<S>(0), half = math::constant<S>(0.5), one = math::constant<S>(1);
    const S total = p.sharpness * p.feedback, square = total * total;
    const S v = half * total - p.sharpness * x, distance = math::absolute(v);
    const S b = distance + half * total;
    const auto step = [&](const S& w) {
      const S e = math::bounded_exp(S(total * w - b)), q = one + e;
      const S u = e - w * q, steep = q * q - total * e, least = steep * steep;
      const S full = least + least - u * (square * (e - e * e));
      const S aim = w + (u + u) * (steep * q) / math::select(full < least, least, full);
      return math::select(aim < zero, zero, math::select(aim > half, half, aim));
    };
    const auto root_of = [&](const S& w) { return math::select(v > zero, S(one - w), w); };
    // Feedback below 0 makes the root less sensitive.
    const S margin = one - math::maximum(total, zero) * math::constant<S>(0.25);
    // True if the step from w to next may have left an error above rounding / margin.
    const auto far = [&](const S& w, const S& next) {
      return math::absolute(S(next - w)) > margin * math::constant<S>(kNear<S>);
    };
    const S gap = math::constant<S>(4) - total;
    S w = half * gap / (distance + distance + gap);
    for (int i = 0; i < kBlindSteps<S>; ++i) w = step(w);
    const S found = step(w);
    const auto moving = far(w, found);
    if (!any_of(moving)) return root_of(found);
    const S next = step(found), last = math::select(moving, next, found);
    const decltype(moving) lost = moving & far(found, next);
    if (!any_of(lost)) return root_of(last);
    return math::select(lost, AnyRoot{{GateKind::logistic}}.root(x, p), root_of(last));
  }
  template <class S>
  [[nodiscard, gnu::always_inline]] S slope_at_root(const S&, const S& r, const S&) const {
    return r - r * r;
  }

 private:
  template <class V>
  static constexpr bool kSingle = std::is_same_v<V, float> || std::is_same_v<V, Pack<float>>;
  // epsilon^(1/3): the error after a step is about the third power of the step.
  template <class V>
  static constexpr double kNear = kSingle<V> ? 4e-3 : 5e-6;
  template <class V>
  static constexpr int kBlindSteps = kSingle<V> ? 1 : 2;
};

// The unrolled gate whose number of iterations the compiler knows.
template <int Count>
struct FixedUnrolledGate {
  template <class S>
  [[nodiscard, gnu::always_inline]] S value(const S& x, const GateScalars<S>& p) const {
    return UnrolledGate<FastCurve>{{}, Count}.value(x, p);
  }
  template <class S>
  [[nodiscard, gnu::always_inline]] GateDerivatives<S> derivatives(const S& x,
                                                                   const GateScalars<S>& p) const {
    return UnrolledGate<FastCurve>{{}, Count}.derivatives(x, p);
  }
};

template <class Gate>
struct DarFastForm : PlainForm {
  Gate gate;

  template <class S>
  [[nodiscard, gnu::always_inline]] S score(const Pair<S, 2, 2>& pair, const auto& p) const {
    const S x = p[1] - dar_cosine(pair.dot, pair);
    return pair.logit + p[0] * gate.value(x, GateScalars<S>{p[1], p[2], p[3]});
  }
  template <class S>
  [[gnu::always_inline]] void score_vjp(const Pair<S, 2, 2>& pair, const auto& p, S g,
                                        Pair<S, 2, 2>& d, auto& dp) const {
    const S x = p[1] - dar_cosine(pair.dot, pair);
    const auto r = gate.derivatives(x, GateScalars<S>{p[1], p[2], p[3]});
    d.logit = g;
    dp[0] += g * r.value;
    const S e = dar_gate_vjp(r, S(g * p[0]), dp);
    dar_cosine_vjp(pair.dot, pair, e, d.dot, d);
  }
};

struct DarStaticForm {
  static constexpr bool gathers_sums = true;
  static constexpr int lane_sums = 3, key_gradients = 1;

  template <class S>
  [[nodiscard, gnu::always_inline]] S score(const Pair<S, 2, 2>& pair, const auto& p) const {
    const S c = dar_cosine(pair.dot, pair);
    return pair.logit + p[0] * math::falling_sigmoid(S(p[2] * (p[1] - c)));
  }
  template <class S>
  [[gnu::always_inline]] void score_vjp(const Pair<S, 2, 2>& pair, const auto& p, S g,
                                        Pair<S, 2, 2>& d, std::array<S, 3>& sums) const {
    const S c = dar_cosine(pair.dot, pair);
    const S r = math::falling_sigmoid(S(p[2] * (p[1] - c)));
    const S e = g * (p[0] * p[2]) * (r - r * r), en = e * pair.query[0];
    d.logit = g;
    d.dot = en * pair.key[0];
    d.key[0] = en * pair.dot;
    sums[0] = mul_add(g, r, sums[0]);
    sums[1] += e;
    sums[2] = mul_add(e, c, sums[2]);
  }
  template <class S>
  void finish(const std::array<S, 3>& sums, const std::array<S, 2>& query, const auto& p,
              std::array<S, 2>& dquery, auto& dp) const {
    dp[0] += sums[0];
    dp[1] -= sums[1];
    dp[2] += (sums[2] - p[1] * sums[1]) / p[2];
    // A query that sees no key may hold any number: n may be NaN.
    const S none = math::constant<S>(0), dn = over_norm(sums[2], query[0]);
    dquery[0] += math::select(math::value_of(sums[2]) == math::value_of(none), none, dn);
  }
};

// Calls f(form) with the fast form of a gate.
template <class F>
void with_dar_fast_form(const ResonanceGate& gate, F&& f) {
  if (gate.converged)
    f(DarFastForm<ConvergedGate<FastRoot>>{});
  else if (gate.iterations <= 1)
    f(DarStaticForm{});
  else if (gate.iterations == 2)
    f(DarFastForm<FixedUnrolledGate<2>>{});
  else
    f(DarFastForm<UnrolledGate<FastCurve>>{{}, {{}, gate.iterations}});
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
