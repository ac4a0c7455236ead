// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention with differentiable adaptive resonance: a pair scores more when its cosine exceeds a vigilance threshold; a
// gate decides how much more. Each formula has its derivative below, with G = dL/dscore.
//
//   x = q_i . k_j                        low rank: q P and k P stand for q and k in x, n and m, and nowhere else
//   n = 1/(|q_i| + eps)                  dq = -n^2 q/|q| dn;     m = 1/(|k_j| + eps) likewise
//   c = x n m                            dx = e n m,   dn = e x m,   dm = e x n,   with e = dL/dc
//   r = gate(c)                          e = G L dr/dc;   drho, dalpha, dbeta = G L dr/d(rho, alpha, beta)
//                                        static, unrolled or converged: ops/dar/gate.hpp
//   L = lambda                           dlambda = G r
//   L = lambda w/(1 + w), if adaptive    dlambda = G r w/(1 + w),   dw = G lambda r/(1 + w)^2
//   w = |q_i| |k_j| / d                  d|q| = dw |k|/d,   d|k| = dw |q|/d
//   score = logit + L r                  dlogit = G
//
// Symbols   strength lambda, vigilance rho, sharpness alpha > 0, feedback beta: one value, or one
//           per head; learnable. basis = P (dim_qk, rank): orthonormal columns, fixed. d = dim_qk.
// Bounds    |score - logit| <= |lambda|; equal when lambda = 0 (a logit -0 may become +0), while
//           dlambda is still exact. c does not change when q or k is scaled (up to eps), or when
//           both are rotated. Finite rows of any size have a finite score if their logit is finite,
//           even where their dot product is not (low rank: if scale (q P).(k P) is finite, too).
// Zeros     x/(|x| + eps) has the derivative I/eps at x = 0: gradients of a zero row reach 1/eps.
//           ZeroNorm::regularised keeps this derivative, as automatic differentiation does.
//           ZeroNorm::safe sets the cosine of a zero row to the constant 0, with gradient 0.
// Mixed     (Precision::mixed; dot = 0.0078 and S as in check/mixed_bounds.hpp) norms are those of float rows:
//           |c' - c| <= dot, and a score is off by at most e = dot max_j S_ij + |lambda| min(1, slope dot), where
//           slope is the largest dr/dc: of the logistic gate alpha/4; after n iterations
//           alpha/4 sum_(t<n) (beta alpha/4)^t; converged alpha/(4 - beta alpha). At alpha 12 the gate moves by at most
//           0.024; for random rows of width 64 whose cosine is about rho by 0.001 (root mean square), by 0.005 at most
//           in 20,000 pairs. A converged gate at alpha 8, beta 0.4 has slope 10: 0.08 at worst. Low rank: c is computed
//           in float.
// Ranges    useful: lambda 0.1 ... 0.4, rho 0.4 ... 0.7, alpha 4 ... 12, 1 or 2 iterations with
//           beta <= 0.5 and contraction() < 1. The defaults alpha 8, beta 0.5 stand exactly at 1.
// Learning  keep_in_range() (core/interval.hpp) after a step: sharpness stays positive; of a converged gate,
//           feedback shrinks until contraction() < 1.
// Accuracy  errors of out, gradients on hard inputs (README.md beside this file):
//           accuracy of dar            float 1e-5, 8e-2; double 2e-14, 2e-11
//           accuracy of dar-unrolled   float 3e-5, 3e-2; double 2e-14, 3e-10
//           accuracy of dar-converged  float 2e-5, 4e-2; double 3e-14, 5e-11
//           second derivatives of dar            float 2e-3, of rows of width 1 4e1
//           second derivatives of dar-unrolled   float 6e-4, of rows of width 1 3e0
//           second derivatives of dar-converged  float 2e-2, of rows of width 1 1e0
//           A cosine of rows of width 1 is a sign; where such a row has size 4e-4, its second derivative, 0, is
//           rounding over the square of that size.
// Source    "Attention with Differentiable Adaptive Resonance", sections 2 to 7 and 11. Differs in
//           hiding fully masked rows and in computing dlambda at lambda = 0.
// Cost      static gate: a sigmoid a pair; low rank: a second dot product of width rank.

#include <heed/ops/dar/fast.hpp>
#include <heed/ops/dar/features.hpp>
#include <heed/ops/dar/gate.hpp>
#include <heed/plug/attention.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
struct DarScore : PlainScore {
  static constexpr bool has_projection = true;
  // Feature 0: inverse norm of the row that enters the cosine (n, m). Feature 1: norm of the full
  // row if adaptive, for queries divided by d; else 0.
  static constexpr int query_features = 2, key_features = 2;
  using PlaceFree = DarScore;
  using NormedDots = DarScore;  // the cosine first multiplies its dot product by n
  using KeptFeatures = DarScore;
  template <class S>
  using PairType = PairOf<DarScore, S>;

  Param<Real> strength = Real(0.3), vigilance = Real(0.6), sharpness = Real(8),
              feedback = Real(0.5);
  Param<Real> basis;  // (dim_qk, rank); empty: the cosine is taken at full width

  GateKind gate = GateKind::logistic;
  int iterations = 0;      // steps of the unrolled gate; 0 and 1 give the static one
  bool converged = false;  // takes the fixed point and ignores `iterations`
  bool adaptive = false;   // strength follows the norms
  double eps = 1e-8;
  ZeroNorm zero_norm = ZeroNorm::regularised;

  // p[0] lambda, p[1] rho, p[2] alpha, p[3] beta
  static constexpr auto parameters =
      std::tuple{named("strength", &DarScore::strength),
                 named("vigilance", &DarScore::vigilance),
                 named("sharpness", &DarScore::sharpness, Range::positive),
                 named("feedback", &DarScore::feedback),
                 fixed("projection", &DarScore::basis),
                 option("gate", &DarScore::gate),
                 option("iterations", &DarScore::iterations, at_least(0, "it must be at least 0")),
                 option("converged", &DarScore::converged),
                 option("adaptive", &DarScore::adaptive),
                 option("eps", &DarScore::eps),
                 option("zero_norm", &DarScore::zero_norm)};

  // c_ij
  template <class S>
  [[nodiscard]] S cosine(const PairType<S>& pair) const {
    return detail::dar_cosine(angle_dot(pair), pair);
  }
  // c'_ij, which the gate compares with rho
  template <class S>
  [[nodiscard]] S gate_input(const PairType<S>& pair) const {
    return resonance_gate().input(cosine<S>(pair));
  }
  // r_ij
  template <class S>
  [[nodiscard]] S resonance(const PairType<S>& pair, const auto& p) const {
    return resonance_gate().value(gate_input<S>(pair), GateScalars<S>{p[1], p[2], p[3]});
  }

  // Numbers that reports give of a pair: r, and 1 where c' exceeds the vigilance (ops/dar/gate.hpp), else 0.
  static constexpr std::array measure_names{"mean_resonance", "vigilance_crossings"};
  template <class S>
  [[nodiscard]] std::array<double, 2> measure(const PairType<S>& pair, const auto& p) const {
    return {resonance<S>(pair, p), ResonanceGate::crosses(gate_input<S>(pair), p[1]) ? 1.0 : 0.0};
  }

  template <class S>
  [[nodiscard]] S score(const PairType<S>& pair, const auto& p) const {
    const S r = resonance<S>(pair, p);
    if (!adaptive) return pair.logit + p[0] * r;
    const S w = weight(pair);
    return pair.logit + p[0] * (w / (math::constant<S>(1) + w)) * r;
  }

  template <class S>
  void score_vjp(const PairType<S>& pair, const auto& p, S g, PairType<S>& d, auto& dp) const {
    d.logit = g;
    const ResonanceGate form = resonance_gate();
    const auto r = form.derivatives(form.input(cosine<S>(pair)), GateScalars<S>{p[1], p[2], p[3]});
    const S L = adaptive ? adaptive_vjp(pair, S(g * r.value), p[0], d, dp[0]) : p[0];
    if (!adaptive) dp[0] += g * r.value;
    const S e = detail::dar_gate_vjp(r, S(g * L), dp) * math::constant<S>(form.input_slope());
    detail::dar_cosine_vjp(angle_dot(pair), pair, e, basis.given() ? d.projected : d.dot, d);
  }

  // Calls f with the fast form of the score if there is one. A score that inherits this one may
  // compute something else: f gets it unchanged.
  template <class Score, class F>
  static void with_form(const Score& score, F&& f) {
    if constexpr (std::is_same_v<Score, DarScore>)
      if (score.has_fast_form()) return detail::with_dar_fast_form(score.resonance_gate(), f);
    f(score);
  }

  [[nodiscard]] std::vector<double> feature_numbers() const {
    return {eps, double(zero_norm), double(adaptive)};
  }
  template <class Row, class S>
  void query_features_of(const Row& row, S* f) const {
    features().of(row, 1.0 / double(row.dim()), f);
  }
  template <class Row, class S>
  void key_features_of(const Row& row, S* f) const {
    features().of(row, 1.0, f);
  }
  template <class Row, class S, class Add>
  void query_features_vjp(const Row& row, const S* f, const S* df, const Add& add) const {
    features().vjp(row, 1.0 / double(row.dim()), f, df, add);
  }
  template <class Row, class S, class Add>
  void key_features_vjp(const Row& row, const S* f, const S* df, const Add& add) const {
    features().vjp(row, 1.0, f, df, add);
  }

  // Feedback that takes contraction() of the converged gate to 1 or beyond shrinks to kLargestSlope.
  void keep_jointly() {
    if (!converged || !(contraction() >= 1.0)) return;
    for (Index h = 0; h < std::max(sharpness.size(), feedback.size()); ++h) {
      const double slope = double(sharpness.head(h)) * resonance_gate().steepness();
      Real& beta = feedback.head(h);
      if (slope * std::abs(double(beta)) >= 1.0)
        beta = Real(std::copysign(kLargestSlope / slope, double(beta)));
    }
  }
  [[nodiscard]] const Param<Real>& projection() const { return basis; }

  [[nodiscard]] ResonanceGate resonance_gate() const { return {gate, iterations, converged}; }

  // The bound of |dr_{t+1}/dr_t| in the head where it is largest: below 1 the unrolled gate
  // converges, and `converged` may be set.
  [[nodiscard]] double contraction() const {
    if (!sharpness.given() || !feedback.given()) return 0.0;
    const Index heads = std::max(sharpness.size(), feedback.size());
    double largest = 0.0;
    for (Index h = 0; h < heads; ++h)
      largest = std::max(largest,
                         std::abs(plain_value(sharpness.head(h)) * plain_value(feedback.head(h))));
    return largest * resonance_gate().steepness();
  }

  void check(const Geometry& g, const char* where) const {
    require(eps >= kSmallestEps && eps <= std::numeric_limits<double>::max(), where, ": eps is ",
            eps, ", it must be positive, at least ", kSmallestEps, ", and finite");
    require(!converged || contraction() < 1.0, where, ": the converged gate has the slope bound ",
            contraction(), ", it must be below 1");
    require_orthonormal(basis, g.dim_qk, where);
  }

 private:
  // The slope bound to which a learnt gate that has left its range returns: 1/(1 - slope) is 64.
  static constexpr double kLargestSlope = 1.0 - 1.0 / 64;
  // 1/eps must be finite in float as well.
  static constexpr double kSmallestEps = 1e-37;

  [[nodiscard]] static double plain_value(const Real& x) { return double(math::value_of(x)); }

  [[nodiscard]] bool has_fast_form() const {
    return gate == GateKind::logistic && !adaptive && !basis.given() &&
           largest_exponent() <= math::kFallingRange<Real>;
  }

  // Bound of |alpha (c + beta r - rho)| over all heads, given |c| <= 1.
  [[nodiscard]] double largest_exponent() const {
    double alpha = 0.0, inner = 0.0;
    for (Index i = 0; i < sharpness.size(); ++i)
      alpha = std::max(alpha, std::abs(plain_value(sharpness[i])));
    for (Index i = 0; i < vigilance.size(); ++i)
      inner = std::max(inner, std::abs(plain_value(vigilance[i])));
    double beta = 0.0;
    for (Index i = 0; i < feedback.size(); ++i)
      beta = std::max(beta, std::abs(plain_value(feedback[i])));
    return alpha * (1.0 + inner + beta);
  }

  [[nodiscard]] DarFeatures features() const { return {eps, zero_norm, adaptive, basis.given()}; }

  // The dot product of the rows that enter the cosine.
  template <class S>
  [[nodiscard]] S angle_dot(const PairType<S>& pair) const {
    return basis.given() ? pair.projected : pair.dot;
  }

  // w, limited to a number whose square is finite, where w/(1 + w) already rounds to 1.
  template <class S>
  [[nodiscard]] S weight(const PairType<S>& pair) const {
    const S w = pair.query[1] * pair.key[1];
    const auto value = math::value_of(w);
    using Value = std::remove_cvref_t<decltype(value)>;
    const auto large = value > math::constant<Value>(kLargestWeight);
    return math::select(large, math::constant<S>(kLargestWeight), w);
  }
  static constexpr double kLargestWeight = 1e18;

  // With gr = G r: returns L, sets the gradients of the norms, adds to that of lambda.
  template <class S>
  [[nodiscard]] S adaptive_vjp(const PairType<S>& pair, const S& gr, const S& lambda,
                               PairType<S>& d, S& dlambda) const {
    const S w = weight(pair), inverse = math::constant<S>(1) / (math::constant<S>(1) + w);
    const S share = w * inverse, zero = math::constant<S>(0);
    const auto value = math::value_of(w);
    using Value = std::remove_cvref_t<decltype(value)>;
    const auto large = value >= math::constant<Value>(kLargestWeight);  // w does not change
    const S dw = math::select(large, zero, S(gr * lambda * inverse * inverse));
    dlambda += gr * share;
    d.query[1] = dw * pair.key[1];
    d.key[1] = dw * pair.query[1];
    return lambda * share;
  }
};

// Adaptive resonance on top of softmax(scale q.k).
template <class Real>
using Dar = Attention<Real, DarScore<Real>, Softmax<Real>, Identity<Real>>;

}  // namespace HEED_ABI
}  // namespace heed
